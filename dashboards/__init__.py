"""The dashboards' source. `python -m dashboards.generate` writes their JSON beside it."""
