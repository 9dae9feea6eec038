"""The activations of the feed-forward layers."""
