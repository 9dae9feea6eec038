"""GGUF files, as llama.cpp, Ollama and LM Studio keep models."""
