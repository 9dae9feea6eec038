"""Benchmarks for developers of the engine: `python -m tools.bench`, from a clone."""
