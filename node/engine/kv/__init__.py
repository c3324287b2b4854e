"""KV caches, their commitments, the prefix store and the disk cache."""
