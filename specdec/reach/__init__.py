"""Prefill apart from decode: what carries bytes between the arenas of two engines."""
