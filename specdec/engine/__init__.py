"""SpecEngine, the engine thread, and KV transfers between engines."""
