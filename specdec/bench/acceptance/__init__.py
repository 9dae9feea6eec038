"""The acceptance benchmark: draft tokens accepted per verify step, and the speedup."""
