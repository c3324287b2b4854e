"""Coordinator of a pool: endpoint, members, certificates, API keys, links to nodes, and the `cluster` command."""
