"""HTTP server of the coordinator: protocol, limits, origin check and connection slots."""
