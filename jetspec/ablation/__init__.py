"""Ablations: variants of one run side by side, and what they decide about claims."""
