"""Check every operation of a decode step against its reference, then time it."""
