"""Models: a family's config as a network (spec), the layers it consists of, and their weights."""
