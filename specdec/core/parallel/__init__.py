"""Tensor parallelism: rank 0 plans steps and tells the other ranks what to run."""
