"""Admission of requests: queue, rate limits, API keys, usage and cache scopes."""
