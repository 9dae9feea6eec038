"""The HTTP server: OpenAI's and Anthropic's APIs over one or more engines."""
