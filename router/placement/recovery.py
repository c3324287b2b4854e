"""Recovery rules for a request whose node fails or gives it up, as values.

    event                                             the request
    ────────────────────────────────────────────────  ─────────────────────────────────────────────
    engine crashed in a native call for the request   ends: may be the cause, and is never placed again
    engine died while the request waited or decoded   resumes elsewhere, once; a second crash ends it
    node was lost, fell silent, leaves or drains      resumes elsewhere, MAX_LOSSES times
    node has no memory left to continue the request   resumes elsewhere, or there once it fits: counted as a loss

To resume, another node with the same model (`fingerprint`) gets the known token ids and generates the rest
(`wire.frames.Generate.resume`). If the client has received nothing, the request may instead be retried from its start,
on any model of that name.
"""

from enum import Enum

from wire.refusals import FailureCode, RefusalCode

MAX_CRASHES = 2
"""Number of engine crashes that ends a request."""
MAX_LOSSES = 3
"""Maximum losses that one request survives: lost, stopping or draining nodes, and lack of memory on a node."""
MIN_SILENCE_SECONDS, MAX_SILENCE_SECONDS = 3.0, 10.0
"""Minimum and maximum seconds of silence of a node after which its requests are resumed elsewhere."""
MAX_KNOWN_TOKENS = 1_000_000
"""Maximum stored token ids of each choice of an answer without a limit."""
MEMORY_FAILURES = (RefusalCode.NO_ROOM.value, FailureCode.MEMORY_PRESSURE)
"""Failure codes of requests that a node ended for lack of memory, to keep its other requests running."""


class LossKind(Enum):
    """Cause of the loss of a request's attempt on a node."""

    OWN_CALL = "its engine crashed in a native call for it"
    ENGINE = "its engine crashed otherwise"
    NODE = "its node was lost or is draining"
    MEMORY = "its node had no memory left for it"


_LOSS_KINDS = {
    FailureCode.ENGINE_CRASHED: LossKind.OWN_CALL,
    FailureCode.ENGINE_LOST: LossKind.ENGINE,
    FailureCode.NODE_STOPPING: LossKind.NODE,
    FailureCode.LINK_LOST: LossKind.NODE,
    **dict.fromkeys(MEMORY_FAILURES, LossKind.MEMORY),
}


def classify_loss(code: str) -> LossKind | None:
    """Return the kind of loss of a node's failure code; None for all other codes, which end the request."""
    return _LOSS_KINDS.get(code)


def is_fault(code: str) -> bool:
    """Return whether a failure code is a fault of the engine, which the circuit breaker of the engine counts.

    A failed grammar is a fault of the client. A lost node and a lack of memory are not faults. All other codes count as
    faults, including unknown ones.
    """
    return code != FailureCode.GRAMMAR_FAILED and classify_loss(code) not in (LossKind.NODE, LossKind.MEMORY)


def can_recover(loss: LossKind, losses: int, crashes: int) -> bool:
    """Return whether a request may be recovered after a loss of this kind; never after `LossKind.OWN_CALL`.

    `losses` and `crashes` are the request's totals, which include the current event. The number of crashes decides for
    `ENGINE`, the number of losses for `NODE` and `MEMORY`.
    """
    if loss is LossKind.OWN_CALL:
        return False
    return crashes < MAX_CRASHES if loss is LossKind.ENGINE else losses <= MAX_LOSSES


def compute_silence_limit_seconds(prefill_seconds: float) -> float:
    """Return the seconds of silence of a node after which its request is resumed on another node.

    `prefill_seconds` is the expected time that another node needs before it continues the answer. The longer this
    takes, the longer the request waits for the return of its node.
    """
    return min(MAX_SILENCE_SECONDS, max(MIN_SILENCE_SECONDS, prefill_seconds))
