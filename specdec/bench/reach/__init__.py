"""Measure what prefill apart from decode costs and keeps steady, beside engines that do both."""
