"""Requests before they are scheduled: tokenization, preflight checks and sequences."""
