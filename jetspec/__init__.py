"""JetSpec: distil, measure and serve parallel draft heads for speculative tree decoding."""

__version__ = "0.1.0"
