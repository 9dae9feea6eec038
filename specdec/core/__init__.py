"""One step, and the life of a request: schedule, draft, verify, commit and emit."""
