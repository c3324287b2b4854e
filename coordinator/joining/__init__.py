"""Joining of nodes: enrollment, join tokens, approvals by a person, and the rate limit of attempts."""
