"""Benchmarks of the engine: each checks its results before printing figures."""
