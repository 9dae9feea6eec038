"""Trees as tensors: relations, acceptance, growth and pruning."""
