"""Rerank routes in the API formats of Jina and Cohere."""
