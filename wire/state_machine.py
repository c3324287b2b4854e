"""Errors of the pure state machines (events in, actions out, with a table of legal transitions), and their count."""

from collections.abc import Generator
from contextlib import contextmanager
from enum import StrEnum


class InvariantError(AssertionError):
    """Raised for a violated invariant, which is a bug in this program."""


class IllegalEventError(Exception):
    """Raised for an event that is illegal in the current state. The text names both.

    The cause is a bug of the caller, or a peer that should have been denied.
    """


class StateMachine(StrEnum):
    """State machines of the coordinator whose illegal events are counted."""

    REQUEST = "request"
    MEMBERSHIP = "membership"
    """Membership of a node, with its link."""
    PULL = "pull"
    """Download of a model to nodes."""
    WISH = "wish"
    """Wanted replicas of a model (`cluster model want`)."""
    VIDEO_JOB = "video_job"


class IllegalEventCounts(dict[StateMachine, int]):
    """Number of illegal events and violated invariants by state machine. Any number but 0 is a bug."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(StateMachine, 0))

    @contextmanager
    def count_errors(self, machine: StateMachine) -> Generator[None]:
        """Count `IllegalEventError` and `InvariantError` of the block, and raise them again."""
        try:
            yield
        except (IllegalEventError, InvariantError):
            self[machine] += 1
            raise
