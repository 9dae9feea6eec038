"""The decode loop and the life of a request: schedule, draft, verify, commit and emit."""
