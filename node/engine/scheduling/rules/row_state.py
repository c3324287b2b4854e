"""State machine of a row, as data, from its admission to its last token. Pure.

    waiting ──first chunk──► prefill ──last chunk──► join ──joined──► decode ──finished──► ended
       ▲                        └───────restarted───────┘                │
       ├──returned── preempted ◄──preempted── waiting, prefill, join, decode
       └──requeued── rebuild ◄──────────────batch broken─────────────────┘

`released` is legal in every state and leads to `ended`: the request was cancelled, refused or has failed. A row that is
resumed after its last token goes from `waiting` to `ended`.

Rules
- A row in `waiting` has no cache. A row in `prefill` or `join` has a cache that other rows of its request may share.
- A row in `decode` is in exactly one decode batch. The invariants (`node.engine.scheduling.invariants`) compare states
  with prefills, batches and commitments.
- A row is in `rebuild` only within one call, after which it waits again or its request has failed.
- A refusal of the gate is not an event: the row keeps its state, and its work is tried again.
- `ended` is final. An illegal event is an error of this program. It ends that request, never the process.
"""

from enum import StrEnum

from wire.state_machine import IllegalEventError


class RowState(StrEnum):
    """State of a row."""

    WAITING = "waiting"
    """Queued for its first chunk."""
    PREFILL = "prefill"
    """Prefilled in part."""
    JOIN = "join"
    """Prefilled, and not yet in a decode batch."""
    DECODE = "decode"
    """In a decode batch."""
    PREEMPTED = "preempted"
    """Without memory until there is room."""
    REBUILD = "rebuild"
    """Taken out of a broken batch."""
    ENDED = "ended"
    """Without further tokens."""


class RowEvent(StrEnum):
    """Event that changes the state of a row."""

    CHUNK = "chunk"
    """The forward of a prefill chunk begins, a packed prefill has ended, or the cache was restored from the disk."""
    PREFILLED = "prefilled"
    """All known tokens of the row are prefilled: its prompt, and its generated tokens after a resume or preemption."""
    RESTARTED = "restarted"
    """The row's prefill is discarded and starts again at the first token."""
    JOINED = "joined"
    """The row has joined a decode batch."""
    FINISHED = "finished"
    """The row's last token is known."""
    RELEASED = "released"
    """The row's request ends before the row's last token: it was cancelled, refused or has failed."""
    PREEMPTED = "preempted"
    """The row's memory is released, because memory is short or another API key gets the memory or the row."""
    RETURNED = "returned"
    """The row has a commitment again after a preemption."""
    BATCH_BROKEN = "batch broken"
    """The row's decode batch is discarded after an exception."""
    REQUEUED = "requeued"
    """The prefill of all known tokens of the row is queued again, because its batch broke."""


_W, _P, _J, _D = RowState.WAITING, RowState.PREFILL, RowState.JOIN, RowState.DECODE
_X, _B, _E = RowState.PREEMPTED, RowState.REBUILD, RowState.ENDED

TABLE: dict[RowEvent, dict[RowState, RowState]] = {
    RowEvent.CHUNK: {_W: _P, _P: _P},
    RowEvent.PREFILLED: {_P: _J},
    RowEvent.RESTARTED: {_W: _W, _P: _W, _J: _W},
    RowEvent.JOINED: {_J: _D},
    RowEvent.FINISHED: {_W: _E, _D: _E},
    RowEvent.RELEASED: {_W: _E, _P: _E, _J: _E, _D: _E, _X: _E, _B: _E, _E: _E},
    RowEvent.PREEMPTED: {_W: _X, _P: _X, _J: _X, _D: _X},
    RowEvent.RETURNED: {_X: _W},
    RowEvent.BATCH_BROKEN: {_D: _B},
    RowEvent.REQUEUED: {_B: _W},
}
"""Legal events, each with the states in which it is legal and the state that follows. `FINISHED` in `WAITING` is a
resumed answer whose last token another node has generated."""


def step(state: RowState, event: RowEvent) -> RowState:
    """Return the state that follows `state` after an event. Raise `IllegalEventError` if the event is illegal in
    `state`."""
    after = TABLE[event].get(state)
    if after is None:
        raise IllegalEventError(f"the event {event} is illegal for a row in the state {state}")
    return after
