"""Mamba-1's recurrence over chains and trees: a decay per value channel and key."""
