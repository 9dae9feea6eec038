"""Tools that a chat may call, and their calls."""
