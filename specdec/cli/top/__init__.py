"""A running server as people watch it: what it says, what has changed since, and a picture of both."""
