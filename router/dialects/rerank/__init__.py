"""Rerank in the shapes of Jina and Cohere."""
