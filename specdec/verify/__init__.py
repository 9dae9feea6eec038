"""Decide what logits mean: which token each node chooses, and which path of the tree they make."""
