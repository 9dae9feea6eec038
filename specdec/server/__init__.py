"""The server that OpenAI's clients speak to, over one engine."""
