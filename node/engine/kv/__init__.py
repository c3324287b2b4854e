"""KV caches, their commitments and the prefix store."""
