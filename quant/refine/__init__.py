"""Rounding with feedback: blocks of the same format, closer to the original where the model's inputs make it matter.

`parts.py` takes blocks apart into scales and codes and puts them together; `feedback.py` holds the kernels; `matrix.py`
refines one weight matrix, given the second moments of what it is multiplied with. The method is described in
`quant/refine/README.md`.
"""
