"""What a context remembers of the tokens that it has seen: keys, values and states, and which token left which.

`cells.py` keeps the books, in NumPy; `layout.py` finds out what a model's layers ask for; `kv.py` and `states.py` hold
the memory; `memory.py` joins them, and `reads.py` is what a graph under construction sees of it.
"""
