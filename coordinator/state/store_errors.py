"""Errors of the coordinator's databases."""


class StoreError(Exception):
    """Raised if the state cannot be read or written. The text has the reason."""


class StateLockedError(StoreError):
    """Raised if another process holds the lock of the state folder."""
