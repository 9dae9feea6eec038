"""Models by name: OWNER/NAME on the Hugging Face hub, downloaded into its cache."""
