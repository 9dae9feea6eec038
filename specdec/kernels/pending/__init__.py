"""The paths that rows have accepted and not yet folded into their states: folded where these are loaded."""
