"""Metrics of the pool and of every node for Prometheus, and a configuration for Prometheus."""
