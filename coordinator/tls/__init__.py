"""Certificate authorities of the cluster and of the HTTPS endpoint."""
