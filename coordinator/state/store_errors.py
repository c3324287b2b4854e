"""Errors of the coordinator's databases."""


class StoreError(Exception):
    """The state cannot be read or written. The text has the reason."""


class StateLockedError(StoreError):
    """Another process holds the lock of the state folder."""
