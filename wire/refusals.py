"""Refusals as values: code, message, the memory numbers, and the time of a retry. Also the codes of failures.

A refusal is a normal answer. It does not open a circuit breaker and does not end other requests. STATUS suggests the
HTTP status of each code; apart from that, only `router/errors.py` depends on HTTP.
"""

from enum import StrEnum

from wire.bounds import ErrorText, Estimate, Seconds, Word
from wire.report import WireStruct


class FailureCode(StrEnum):
    """Machine-readable reason why a request or a command that had begun ended without its complete answer."""

    ENGINE_CRASHED = "engine_crashed"
    """From a node: the engine died in a native call for this request, such as its tokenization or prefill.

    To a client, or as the end of a command: the engine died in any way.
    """
    ENGINE_LOST = "engine_lost"
    """From a node: the engine died while it had this request, in a decode step, for another request, or in no call."""
    ENGINE_ERROR = "engine_error"
    """The engine raised an error for this request, and continues with other requests."""
    NODE_STOPPING = "node_stopping"
    """The node stops, or has stopped sharing, and gives the request up."""
    LINK_LOST = "link_lost"
    """The request was sent over the older of two links of its node, and that link was lost."""
    NODE_LOST = "node_lost"
    """The node was lost or gave the request up, and no other node could continue it.

    Or: the node of a command was lost.
    """
    MEMORY_PRESSURE = "memory_pressure"
    """The engine was above cap − leases, and ended the request to reduce its memory."""
    NO_HEADROOM = "no_headroom"
    """The answer became longer than expected, and no memory of the node is left for more tokens."""
    GRAMMAR_FAILED = "grammar_failed"
    """No answer can satisfy the grammar. The client has to change the grammar."""
    ANSWER_TOO_LONG = "answer_too_long"
    """An answer that is not streamed is longer than the router stores."""
    CANCELLED = "cancelled"
    """The client has disconnected, or the request was cancelled."""
    SLOW_CLIENT = "slow_client"
    """The client does not read its answer."""
    COMMAND_TIMEOUT = "command_timeout"
    """The node did not answer a command in time."""
    SHUTTING_DOWN = "shutting_down"
    """The coordinator stops."""
    UPSTREAM_FAILED = "upstream_failed"
    """The upstream of an alias did not answer, or not to the end."""
    ROUTER_ERROR = "router_error"
    """The router or a node broke the order of events of this request, which is a bug."""


class RefusalCode(StrEnum):
    """Machine-readable reason of a refusal; `error.code` in HTTP bodies."""

    TOO_LARGE = "prefill_memory_exceeded"
    """The request would not fit even on the idle node."""
    NO_ROOM = "no_headroom"
    """The request does not fit into the free memory now."""
    UNREADABLE = "memory_unreadable"
    """The memory in use on the node, or the available memory of its system, cannot be read."""
    CONTEXT = "context_length_exceeded"
    """Prompt and answer exceed the context of the model, or the context limit of the profile."""
    UNSUPPORTED = "unsupported_parameter"
    """The model or the node does not support a part of the request."""
    NO_MODEL = "model_not_found"
    """No node has the model, or the node that refused does not have it."""
    NOT_READY = "engine_not_ready"
    """No node serves requests now, or the node that refused does not.

    Its engine starts, its link is lost, or it is cordoned.
    """
    DRAINING = "node_draining"
    """The node drains or is paused, and accepts no new requests."""
    QUEUE_FULL = "queue_full"
    """The queue is full, or too many commands to nodes are open."""
    OVER_SHARE = "over_share"
    """The key already has its share of the queue, or of the open token counts."""
    DEADLINE = "queue_deadline"
    """The request was queued for too long."""
    INVALID = "invalid_request"
    """The request has invalid values."""
    TEMPLATE = "template_failed"
    """The chat template or the tokenizer does not accept the messages."""
    LOAD_FAILED = "model_load_failed"
    """The model cannot be loaded."""
    IN_USE = "model_in_use"
    """Requests use the model that is to be unloaded."""
    RATE_LIMITED = "rate_limited"
    """The API key is over one of its limits, such as requests per minute or open videos."""
    NOT_ALLOWED = "not_allowed"
    """The key may not use the model, or no node that it may use has the model."""


STATUS: dict[RefusalCode, int] = {
    RefusalCode.TOO_LARGE: 400,
    RefusalCode.CONTEXT: 400,
    RefusalCode.UNSUPPORTED: 400,
    RefusalCode.INVALID: 400,
    RefusalCode.TEMPLATE: 400,
    RefusalCode.NO_MODEL: 404,
    RefusalCode.IN_USE: 409,
    RefusalCode.LOAD_FAILED: 500,
    RefusalCode.NO_ROOM: 503,
    RefusalCode.UNREADABLE: 503,
    RefusalCode.NOT_READY: 503,
    RefusalCode.DRAINING: 503,
    RefusalCode.QUEUE_FULL: 503,
    RefusalCode.DEADLINE: 503,
    RefusalCode.OVER_SHARE: 429,
    RefusalCode.RATE_LIMITED: 429,
    RefusalCode.NOT_ALLOWED: 403,
}
"""HTTP status of a refusal, by its code."""

FINAL = frozenset(code for code, status in STATUS.items() if status in (400, 403, 404, 409, 500))
"""Codes of refusals that are not retried: the request, the limits of the key or the files of the model must change.

`IN_USE` is one of them, because it refuses a command, and only requests are retried.
"""


class MemoryNumbers(WireStruct, frozen=True, array_like=True, gc=False):
    """Numbers of a memory check in bytes (formulas: `wire.capacity.arithmetic`); `error.memory` in HTTP bodies."""

    predicted: Estimate | None = None
    """current + reserved + estimate + margin; None if the footprint is unknown."""
    ceiling: Estimate = 0
    current: Estimate | None = None
    """Memory in use; without `Memory.reusable`, except in the refusal of a running request.

    None if the footprint is unknown.
    """
    reserved: Estimate = 0
    """Bytes that are reserved on the node or by the router, and not in use yet."""
    estimate: Estimate = 0
    """Bytes that the checked request, load or lease needs in addition to `current` and `reserved`."""
    margin: Estimate = 0
    cap: Estimate = 0
    headroom: Estimate | None = None
    """Bytes that would have fitted, which may be negative; None if the footprint is unknown."""
    bound_by: Word = ""
    """Name of the term that sets the ceiling (`wire.report.Memory.bound_by`)."""


class Refused(WireStruct, frozen=True, array_like=True, gc=False):
    """Refusal of a request, a command about a model, or a lease."""

    code: RefusalCode
    message: ErrorText
    """Text for the client."""
    numbers: MemoryNumbers | None = None
    """Numbers of the memory check that refused; None for any other reason."""
    retry_after: Seconds | None = None
    """Seconds after which a retry can succeed; None if unknown or never."""
    node: Word = ""
    """Name of the node that refused, or of the node with most headroom; empty if no node is concerned."""

    @property
    def status(self) -> int:
        """HTTP status of the code."""
        return STATUS[self.code]

    @property
    def final(self) -> bool:
        """Whether a retry has the same result, at least at the node that refused (`FINAL`)."""
        return self.code in FINAL
