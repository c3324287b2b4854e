"""Model files of this node: metadata of the hub, downloads, the mirror for other nodes, verification, removal."""
