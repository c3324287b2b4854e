"""Errors that the pure state machines share: events in, actions out, with a table of legal transitions."""


class InvariantError(AssertionError):
    """Raised for a violated invariant, which is a bug in this program."""


class IllegalEventError(Exception):
    """Raised for an event that is illegal in the current state. The text names both.

    The cause is a bug of the caller, or a peer that should have been denied.
    """
