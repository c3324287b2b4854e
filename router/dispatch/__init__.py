"""Dispatch: the life of a request between placement and its last token."""
