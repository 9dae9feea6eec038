"""Mixtures of experts: routing, and the experts themselves."""
