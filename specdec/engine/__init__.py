"""What callers hold: SpecEngine, and the thread that owns the model."""
