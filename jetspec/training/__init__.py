"""Distillation of draft heads."""
