"""All GPU checks and benchmarks, unattended and within a time budget."""
