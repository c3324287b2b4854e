"""Source of the dashboards. `python -m dashboards.generate` writes their JSON into this folder."""
