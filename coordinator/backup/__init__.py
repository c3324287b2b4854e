"""Keeping a cluster: backups, restoring them, and which of two coordinators is the one that counts."""
