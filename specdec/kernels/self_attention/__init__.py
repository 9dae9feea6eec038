"""An attention layer between its two projections: head norms, rotation, KV, attention, gate."""
