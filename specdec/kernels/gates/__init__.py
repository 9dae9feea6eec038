"""The small maps that feed a recurrence: decays, write strengths, unit keys and queries, step sizes."""
