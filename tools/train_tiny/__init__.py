"""Train the small checkpoint that ships with the package. Nothing that serves needs any of this."""
