"""Refining a whole model: layer by layer, with the inputs that the already quantized layers give.

`layer.py` runs one layer and finds its products; `walk.py` goes through the layers with two streams of hidden states,
the original's and the quantized model's, and decides by text that was held back. One matrix is `quant/refine`'s job.
"""
