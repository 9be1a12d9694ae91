"""Load a frozen target, name it by its fingerprint, and read its hidden states."""
