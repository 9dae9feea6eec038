"""What a user may set, each value checked where it is given. Nothing is computed from it here."""
