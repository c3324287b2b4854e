"""Embeddings in the shapes of OpenAI and Ollama."""
