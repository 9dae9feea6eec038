"""User settings, validated on input. Nothing is derived from them here."""
