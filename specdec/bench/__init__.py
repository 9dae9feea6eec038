"""Benchmarks of the engine: each checks its results before it prints a figure."""
