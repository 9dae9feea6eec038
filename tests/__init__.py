"""Tests, sorted as the package is; a regular package, so that no other `tests` on the path answers for it."""
