"""Gates of a recurrence: decays, write strengths, unit keys and queries, step sizes."""
