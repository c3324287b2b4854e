"""Every reason why we decline, as a value: whose limit it was, all the numbers, what to do, and when to try again.

A refusal is an answer, never a failure: it opens no breaker and ends nobody else's request. The HTTP status that
belongs to each code is a hint for `router/problems.py`, the only other place that knows about HTTP.
"""

from enum import StrEnum

from wire.bounds import ErrorText, Estimate, Seconds, Word
from wire.report import Part

GRAMMAR_FAILED = "grammar_failed"
"""Code of a `Failed` whose request asked for a grammar that cannot be followed to its end: the client's fault."""


class Code(StrEnum):
    """The machine-readable reason, `error.code` in bodies."""

    TOO_LARGE = "prefill_memory_exceeded"
    NO_ROOM = "no_headroom"
    UNREADABLE = "memory_unreadable"
    CONTEXT = "context_length_exceeded"
    UNSUPPORTED = "unsupported_parameter"
    NO_MODEL = "model_not_found"
    NOT_READY = "engine_not_ready"
    DRAINING = "node_draining"
    QUEUE_FULL = "queue_full"
    OVER_SHARE = "over_share"
    DEADLINE = "queue_deadline"
    INVALID = "invalid_request"
    TEMPLATE = "template_failed"
    LOAD_FAILED = "model_load_failed"
    IN_USE = "model_in_use"
    RATE_LIMITED = "rate_limited"
    NOT_ALLOWED = "not_allowed"


STATUS: dict[Code, int] = {
    Code.TOO_LARGE: 400, Code.CONTEXT: 400, Code.UNSUPPORTED: 400, Code.INVALID: 400, Code.TEMPLATE: 400,
    Code.NO_MODEL: 404, Code.IN_USE: 409, Code.LOAD_FAILED: 500,
    Code.NO_ROOM: 503, Code.UNREADABLE: 503, Code.NOT_READY: 503, Code.DRAINING: 503, Code.QUEUE_FULL: 503,
    Code.DEADLINE: 503,
    Code.OVER_SHARE: 429, Code.RATE_LIMITED: 429, Code.NOT_ALLOWED: 403,
}  # fmt: skip

FINAL = frozenset(code for code, status in STATUS.items() if status in (400, 403, 404, 409, 500))
"""Waiting will not help: the request, or a model's files, must change."""


class Numbers(Part, frozen=True, array_like=True, gc=False):
    """The verdict's arithmetic in bytes (architecture §3), `error.memory` in bodies."""

    predicted: Estimate | None = None
    ceiling: Estimate = 0
    current: Estimate | None = None
    reserved: Estimate = 0
    estimate: Estimate = 0
    margin: Estimate = 0
    cap: Estimate = 0
    headroom: Estimate | None = None
    bound_by: Word = ""


class Refused(Part, frozen=True, array_like=True, gc=False):
    """Why not: the code, a sentence for a person with the next step in it, the numbers, and when to retry (seconds)."""

    code: Code
    message: ErrorText
    numbers: Numbers | None = None
    retry_after: Seconds | None = None
    node: Word = ""

    @property
    def status(self) -> int:
        """The HTTP status that belongs to the code."""
        return STATUS[self.code]

    @property
    def final(self) -> bool:
        """Whether no other node could answer otherwise."""
        return self.code in FINAL
