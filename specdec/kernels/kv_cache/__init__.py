"""KV cache pages: append a window's keys and values, and move those of an accepted path."""
