"""Backup and restore of a cluster, and the fence that stops a superseded coordinator."""
