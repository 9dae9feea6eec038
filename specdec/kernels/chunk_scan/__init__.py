"""The recurrence over wide windows: what no state enters is prepared at once, then it is swept along."""
