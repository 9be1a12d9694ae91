"""Measurement of draft heads: cells, matrices, intervals and the serving table."""
