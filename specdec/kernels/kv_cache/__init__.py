"""KV cache pages: append a window's keys and values, move an accepted path's."""
