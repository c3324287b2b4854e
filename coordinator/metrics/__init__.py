"""Metrics of the pool and of every node for Prometheus, and its configuration."""
