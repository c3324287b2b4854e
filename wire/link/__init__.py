"""Transport of frames between a node and the coordinator."""
