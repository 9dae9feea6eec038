"""specdec: an inference engine for hybrid language models whose core loop is speculative decoding."""
