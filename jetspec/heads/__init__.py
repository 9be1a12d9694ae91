"""Draft heads and the formats they are kept in."""
