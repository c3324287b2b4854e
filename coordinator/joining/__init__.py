"""Joining of nodes: enrollment, join tokens, approvals and the limit of attempts."""
