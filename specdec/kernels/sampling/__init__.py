"""Sampling: penalties, filters and counter-based noise before the argmax."""
