"""Send prompts to an OpenAI-style server; report its speed and the speedup by its drafts."""
