"""Ollama's chat, generate and model routes."""
