"""The short causal convolution before a recurrence, along chains and tree paths."""
