"""The short causal convolution before a recurrence, along chains and through a tree's parents."""
