"""Ollama's API: chats, completions, and lists of models."""
