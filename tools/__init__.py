"""Programs for the maintainers of specdec, outside its wheel."""
