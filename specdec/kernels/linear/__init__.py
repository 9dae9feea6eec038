"""Multiply by a weight that was packed once, when it was loaded."""
