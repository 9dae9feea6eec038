"""Sampling and verification: the token chosen at each node, and the accepted path."""
