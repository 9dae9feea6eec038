"""`specdec top`: poll a running server, compare readings, and draw them."""
