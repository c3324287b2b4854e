"""Observation of the pool: event stream, log reader, load history, and nodes as rows of the API."""
