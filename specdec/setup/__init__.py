"""From settings to a running loop: resolve them, fit memory, build the engine and warm it up."""
