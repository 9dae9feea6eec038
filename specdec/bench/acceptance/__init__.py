"""The benchmark of acceptance: how many drafted tokens a verify step keeps, and what that earns."""
