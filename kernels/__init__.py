"""Triton kernels for speculative tree decoding, each beside a plain torch reference."""
