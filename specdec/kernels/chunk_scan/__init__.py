"""The recurrence over wide windows: a parallel preparation without states, then a sweep over the parts."""
