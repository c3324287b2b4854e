"""Placement: the node that takes a request. Pure."""
