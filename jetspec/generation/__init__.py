"""Regeneration of training text by the target: one protocol, several backends."""
