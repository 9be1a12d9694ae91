"""The fast path: paged cache, graphs and scheduler around the tree kernels."""
