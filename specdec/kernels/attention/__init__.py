"""Attention over paged keys and values, through the ancestors of each node."""
