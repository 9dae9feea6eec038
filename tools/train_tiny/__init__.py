"""Train the small checkpoint that ships with the package. Serving needs none of this."""
