"""Rotary positions."""
