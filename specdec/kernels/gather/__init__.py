"""Rows of a table by their number, rows side by side, and their sum."""
