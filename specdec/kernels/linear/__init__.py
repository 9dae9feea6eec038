"""Matrix products with weights that are packed once, at load."""
