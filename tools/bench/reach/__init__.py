"""Measure the costs and the steady ITL of prefill/decode disaggregation, beside engines that do both."""
