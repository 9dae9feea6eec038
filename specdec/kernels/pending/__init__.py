"""Pending paths: accepted but not yet folded into the states; they are folded when the states are loaded."""
