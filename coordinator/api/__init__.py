"""The control plane: documented routes below /api/v1 for the commands of `cluster`, and routes for Prometheus."""
