"""Mamba-1's recurrence over chains and trees: each channel of a value has a decay of its own for each key."""
