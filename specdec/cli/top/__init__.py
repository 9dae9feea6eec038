"""`specdec top`: read a running server, compare readings, and draw them."""
