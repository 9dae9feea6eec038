"""GGUF files of llama.cpp, Ollama and LM Studio."""
