"""Server of model files by the protocol of the hub, and the mirror of a node."""
