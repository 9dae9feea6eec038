"""Row lookup, concatenation, sums and scaling."""
