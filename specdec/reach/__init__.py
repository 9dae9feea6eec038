"""Disaggregated prefill: move KV cache and states between the arenas of two engines."""
