"""The papers' formulas, costs measured on this machine, and what both predict."""
