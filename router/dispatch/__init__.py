"""Dispatch: the path of a request from placement to its last token."""
