"""Paged attention: each tree node attends to its ancestors."""
