"""Placement: choice of the node for a request. Pure."""
