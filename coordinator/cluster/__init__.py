"""Members of the cluster: membership, registry, link server and orders to nodes."""
