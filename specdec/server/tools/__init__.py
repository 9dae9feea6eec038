"""Tools: what a chat may call, and how the calls that a model writes are read."""
