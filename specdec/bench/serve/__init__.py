"""Drive an OpenAI-style server with prompts, and report how fast it answers and what its drafts earn."""
