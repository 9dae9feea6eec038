"""Tests, mirroring the package; a regular package, so that other `tests` on the path do not shadow it."""
