"""Mamba-2 between its two projections: convolution, step sizes, recurrence, skip, gated norm."""
