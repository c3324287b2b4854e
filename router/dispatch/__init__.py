"""Dispatch: accept requests, send them to nodes, follow them to their end, and record their usage."""
