"""What becomes of a request that its node lets fall: the rules, as values.

    what happened                                     the request
    ────────────────────────────────────────────────  ─────────────────────────────────────────────
    its engine died with it in the forward            ends: it may be the cause, and is never placed again
    its engine died, and it only waited or decoded    goes on elsewhere, once; nothing survives a second crash
    its node was lost, fell silent, leaves or drains  goes on elsewhere, MOST_LOSSES times
    its node has no memory left to go on with it      goes on elsewhere, or there when there is room: counted as a loss

"Goes on" means: another node with the same model (`fingerprint`) is given the ids that were heard so far and writes the
rest (`wire.frames.Generate.resume`). What nobody has read a word of may also begin anew, on any model of that name.
"""

from enum import Enum

from wire.refusals import GRAMMAR_FAILED

MOST_CRASHES = 2
MOST_LOSSES = 3
"""Nodes that one request may lose or leave."""
SOON, LATE = 3.0, 10.0
"""Seconds of silence after which a stream is resumed elsewhere at the earliest and at the latest."""
MOST_KNOWN = 1_000_000
"""Tokens of an answer without a limit that are remembered."""
GROWTH = 64
"""Tokens beyond what is known that are reserved for an answer which outgrew what is usual."""

CRASHED = "engine_crashed"
LOST = "engine_lost"
"""A node's word for requests that its engine had when it died, but that were not in the forward."""
STOPS, LINK_LOST = "node_stopping", "link_lost"
"""A node's words for requests that it had when it stopped, and that came over an older link of its own."""
SHORT_OF_MEMORY = ("no_headroom", "memory_pressure")
"""A node's words for requests that it gave up so that the others, and the machine, go on."""


class Fall(Enum):
    """How a node let a request fall."""

    FORWARD = "its engine crashed in the forward of it"
    ENGINE = "its engine died beside it"
    NODE = "its node went"
    MEMORY = "its node had no room to go on with it"


_FALLS = {
    CRASHED: Fall.FORWARD, LOST: Fall.ENGINE, STOPS: Fall.NODE, LINK_LOST: Fall.NODE,
    **dict.fromkeys(SHORT_OF_MEMORY, Fall.MEMORY),
}  # fmt: skip


def fall_of(code: str) -> Fall | None:
    """Read a node's word for a broken request; None: it is broken for good, whoever asks again."""
    return _FALLS.get(code)


def is_fault(code: str) -> bool:
    """Return whether a node's word for a broken request speaks against its engine: a grammar that cannot be followed
    speaks against the client that sent it."""
    return code != GRAMMAR_FAILED and fall_of(code) not in (Fall.NODE, Fall.MEMORY)


def survives(fall: Fall, losses: int, crashes: int) -> bool:
    """Say whether a request may go on after this fall, which `losses` and `crashes` count already."""
    if fall is Fall.FORWARD:
        return False
    return crashes < MOST_CRASHES if fall is Fall.ENGINE else losses <= MOST_LOSSES


def patience(expected: float) -> float:
    """Give the seconds of silence after which it is better to resume elsewhere, where writing what is known again is
    expected to take `expected` seconds: who would lose much waits longer for the node to come back."""
    return min(LATE, max(SOON, expected))
