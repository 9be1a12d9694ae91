"""Draft trees: one flat record, the builders and the scores that order them."""
