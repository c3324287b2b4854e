"""Grafana dashboards as Python code. `python -m dashboards.generate` writes their JSON into this folder."""
