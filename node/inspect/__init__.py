"""Descriptions of a node for `cluster doctor` and `cluster config`."""
