"""Agent of a node: its link to the coordinator, discovery, enrollment and identity."""
