"""numba kernels of the ops, one file per family as in `engine/ops`. Imported only when a graph is compiled."""
