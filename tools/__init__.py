"""Maintainers' programs, not part of the wheel."""
