"""Embedding routes in the API formats of OpenAI and Ollama."""
