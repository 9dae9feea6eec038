"""What the engine does, measured: each benchmark checks its results before it prints a figure."""
