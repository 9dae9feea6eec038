"""From settings to a loop that runs: resolve them, fit memory, build the engine and warm it up."""
