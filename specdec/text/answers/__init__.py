"""How an answer is read: its thinking, its text and its calls, the same however it comes in pieces."""
