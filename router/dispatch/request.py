"""State of one request from arrival to its end, shared by the dispatcher, which adds deltas, and one reader.

The deltas of one frame are added, then every request with new deltas is flushed once. A flush calls a stream's sink or
wakes a waiting reader through one Future. As long as the reader keeps up, a token costs no clock reading, no task and
no counting. The number `takes` shows the dispatcher's sweep whether the reader keeps up.
"""

import asyncio
import io
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from router.admission.queue import QueuedRequest
from router.admission.rate_limits import RateState
from router.placement.candidate import FIRST, AttemptHistory, ResourceDemand
from router.placement.prefix_affinity import NOWHERE, PrefixHashChain
from router.placement.recovery import MAX_KNOWN_TOKENS
from wire.capacity.fairness import WeightedKey
from wire.frames import Channel, Delta, Finished, GenerationParams, Logprob, Message
from wire.identity import NodeId
from wire.refusals import FailureCode, Refused

MAX_STEPS = 64
"""Maximum recorded steps of a request."""
DELTA_BYTES = 256
"""Bytes charged for one waiting delta, and for one stored tool call, in addition to its text."""
LOGPROB_BYTES = 96
"""Bytes charged for one token's log probability, or one alternative, in addition to the token."""
MAX_DELTAS_TAKEN = 256
"""Maximum deltas returned at once: a slow reader that still reads then shows progress."""
MAX_ANSWER_CHARS = 32 * 1024 * 1024
"""Maximum characters of one answer that is not streamed; log probabilities count with their cost."""


class RequestSpec(msgspec.Struct, frozen=True, gc=False):
    """Request as parsed by a dialect: prompt, parameters, API key, and whether the answer is streamed.

    Fields with the name of a field of `Generate` have the same meaning.
    """

    demand: ResourceDemand
    key: str
    """Id of the API key."""
    request_id: str
    messages: tuple[Message, ...]
    params: GenerationParams
    created: int
    """Time of arrival in Unix seconds."""
    stream: bool
    """Whether the answer is streamed."""
    tools: str = ""
    template: str = ""
    include_usage: bool = False
    text: str = ""
    ids: tuple[int, ...] = ()
    session: str = ""
    """Name of the conversation, if its client gave one."""
    ignored: tuple[str, ...] = ()
    """Fields and tools of the request's body that have no effect."""


class CompleteAnswer(msgspec.Struct, frozen=True, gc=False):
    """Whole answer of a request that is not streamed, as collected from its deltas."""

    texts: Mapping[tuple[int, int], str]
    """Texts by choice and channel."""
    calls: Mapping[int, Sequence[str]]
    """Tool calls by choice, in the nodes' JSON."""
    logprobs: Mapping[int, Sequence[Logprob]]
    """Log probabilities by choice."""
    fingerprint: str = ""
    """Fingerprint of the model that generated the answer."""


class RequestFailure(msgspec.Struct, frozen=True, gc=False):
    """Failure of a request that had begun: a machine-readable code and a sentence."""

    code: str
    message: str


Outcome = Finished | Refused | RequestFailure
SWAP = "waiting for a model swap"
CANCELLED = RequestFailure(FailureCode.CANCELLED, "the client cancelled the request")
SLOW = RequestFailure(FailureCode.SLOW_CLIENT, "the client did not read its stream")


class ActiveRequest:
    """Request from its arrival to its end: its place, attempts, token ids and outcome.

    `Dispatcher.submit` creates it as a `StreamingRequest` or a `BufferedRequest`.
    """

    __slots__ = (
        "arrived",
        "attempts",
        "begun",
        "buffered",
        "chain",
        "charged",
        "crashes",
        "deadline",
        "demand",
        "entry",
        "estimated_tokens",
        "fallen",
        "fingerprint",
        "first_at",
        "forgotten",
        "generated_ids",
        "in_a_row",
        "job",
        "losses",
        "lost",
        "never",
        "node",
        "node_name",
        "number",
        "opened",
        "outcome",
        "owner",
        "params",
        "queued_at",
        "rates",
        "read",
        "refused",
        "request",
        "sink",
        "steps",
        "swap",
        "waiter",
        "warm",
    )

    def __init__(self, job: RequestSpec, owner: WeightedKey, number: int, now: float) -> None:
        self.job = job
        self.owner = owner
        self.number = number
        self.demand = job.demand
        self.arrived = now
        self.outcome: Outcome | None = None
        self.waiter: asyncio.Future[None] | None = None
        self.sink: Callable[[], None] | None = None
        self.chain: PrefixHashChain | None = None
        self.warm = NOWHERE
        # place
        self.request = 0
        self.node: NodeId | None = None
        self.node_name = ""
        self.entry: QueuedRequest[ActiveRequest] | None = None
        self.queued_at = 0.0
        self.swap = ""  # model swap that the request waits for in the queue
        self.deadline: float | None = None
        # attempts
        self.attempts = 0
        self.in_a_row = 0
        self.losses = 0
        self.crashes = 0
        self.refused: dict[NodeId, float] = {}
        self.never: dict[NodeId, Refused] = {}
        self.lost: set[NodeId] = set()
        self.fallen: RequestFailure | None = None
        self.first_at: float | None = None
        # token ids of each choice and their model, for a resume on another node
        self.params = job.params
        self.generated_ids: list[list[int]] = [[] for _ in range(max(1, job.params.n))]
        self.fingerprint = ""
        # usage for any outcome: prompt tokens, cached tokens among them, and the number of discarded ids
        self.read: tuple[int, int] = (0, 0)
        self.forgotten = 0
        # reader
        self.opened = False
        self.begun = False
        self.buffered = 0
        self.charged: int | None = None
        self.estimated_tokens = 0
        self.steps: list[tuple[float, str, str]] = []
        self.rates: tuple[RateState, ...] = ()

    def add_step(self, now: float, what: str, node: str = "") -> None:
        """Record a step at `now` (monotonic seconds). Beyond MAX_STEPS the middle step is removed."""
        if len(self.steps) >= MAX_STEPS:
            del self.steps[MAX_STEPS // 2]
        self.steps.append((now - self.arrived, what, node))

    def trials(self) -> AttemptHistory:
        """Return the earlier attempts, which placement takes into account."""
        if not self.attempts and self.entry is None:  # a waiting request must not be excluded by its own hold
            return FIRST
        return AttemptHistory(
            self.refused, self.never, self.lost, self.number, self.fingerprint if self.written else ""
        )

    @property
    def waits_for(self) -> str:
        """Reason of a wait, as shown to the client; empty without one. It names no node and no model, which may be
        hidden from the key."""
        return SWAP if self.swap else ""

    @property
    def written(self) -> int:
        """Number of received tokens of the longest choice; 0 after the stored token ids were discarded."""
        return max(map(len, self.generated_ids), default=0)

    @property
    def wrote(self) -> int:
        """Number of generated tokens received, of all choices together."""
        return self.forgotten + sum(map(len, self.generated_ids))

    @property
    def resumable(self) -> bool:
        """Whether another node that has the same model could resume the answer."""
        return bool(self.fingerprint) and self.written > 0

    def token_ids(self) -> tuple[tuple[int, ...], ...]:
        """Return the received token ids of each choice; empty before the first token, or if they were discarded."""
        return tuple(map(tuple, self.generated_ids)) if self.written else ()

    def record_ids(self, delta: Delta) -> None:
        """Store the token ids of a delta. An unknown choice discards all ids, and the answer can no longer be
        resumed."""
        try:
            self.generated_ids[delta.choice] += delta.ids
        except IndexError:
            self.forget_ids(delta)

    def forget_ids(self, delta: Delta | None = None) -> None:
        """Discard the stored token ids and keep only their number."""
        self.forgotten = self.wrote + (0 if delta is None else len(delta.ids))
        self.generated_ids = []

    def discard_excess(self) -> None:
        """Discard the token ids if the node sent more tokens than requested, because such a node is not credible."""
        if self.written > (self.params.max_tokens or MAX_KNOWN_TOKENS):
            self.forget_ids()

    def add(self, delta: Delta) -> bool:
        """Store one delta from the node. Return True if `flush` must follow after the last delta of its frame."""
        raise NotImplementedError

    def discard(self) -> None:
        """Discard the answer, of which the client has received nothing, before a restart."""
        self.forgotten = 0
        self.generated_ids = [[] for _ in range(max(1, self.params.n))]

    def flush(self) -> None:
        """Notify the reader: call the sink, or wake a waiting reader."""
        if self.sink is not None:
            self.sink()
            return
        waiter = self.waiter
        if waiter is not None:
            self.waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def end(self, outcome: Outcome) -> None:
        """Set the outcome and notify the reader. An outcome that is already set stays."""
        if self.outcome is None:
            self.outcome = outcome
            self.flush()

    def wait(self) -> asyncio.Future[None]:
        """Return a Future that is done at the next flush. Only the last returned Future is served."""
        self.waiter = asyncio.get_running_loop().create_future()
        return self.waiter


class StreamingRequest(ActiveRequest):
    """Request with a streamed answer. `buffered` is the cost in bytes of the deltas that arrived while the reader was
    `blocked`."""

    __slots__ = ("blocked", "keepalive_due", "pending", "seen_takes", "still", "takes")

    def __init__(self, job: RequestSpec, owner: WeightedKey, number: int, now: float) -> None:
        super().__init__(job, owner, number, now)
        self.pending: list[Delta] = []
        self.blocked = True
        self.keepalive_due = False
        self.takes = 0
        self.seen_takes = 0
        self.still = 0.0

    @property
    def ready(self) -> bool:
        """Whether there are deltas, an outcome or a keep-alive to send."""
        return bool(self.pending) or self.outcome is not None or self.keepalive_due

    def add(self, delta: Delta) -> bool:
        """Append one delta to the pending deltas of the reader. Return True if no other delta was pending."""
        try:  # as in `record_ids`, without the call: this runs for every token of a stream
            self.generated_ids[delta.choice] += delta.ids
        except IndexError:
            self.forget_ids(delta)
        pending = self.pending
        pending.append(delta)
        if self.blocked:
            self.buffered += _cost(delta)
        return len(pending) == 1

    def take(self) -> list[Delta]:
        """Return the pending deltas in order, at most MAX_DELTAS_TAKEN, and clear a keep-alive."""
        self.takes += 1
        self.keepalive_due = False
        taken = self.pending
        if not taken:
            return taken
        self.begun = True
        self.pending = []
        if len(taken) > MAX_DELTAS_TAKEN:
            self.pending = taken[MAX_DELTAS_TAKEN:]
            del taken[MAX_DELTAS_TAKEN:]
        if self.buffered:
            self.buffered = sum(_cost(delta) for delta in self.pending)
        return taken

    def discard(self) -> None:
        """Discard the answer and its pending deltas."""
        super().discard()
        self.drop()

    def drop(self) -> None:
        """Discard the pending deltas, because the reader does not read. Their tokens still count as generated."""
        self.pending = []
        self.buffered = 0


class BufferedRequest(ActiveRequest):
    """Request with an answer that is read once, at the end. `buffered` is its collected size in characters, with
    overheads."""

    __slots__ = ("_calls", "_logprobs", "_texts")

    def __init__(self, job: RequestSpec, owner: WeightedKey, number: int, now: float) -> None:
        super().__init__(job, owner, number, now)
        self._empty()

    def add(self, delta: Delta) -> bool:
        """Collect the requested parts of a delta, and return False: the reader waits for the outcome only."""
        choice = delta.choice
        if not 0 <= choice < self.job.params.n:
            return False
        self.record_ids(delta)
        for channel, text in delta.pieces:
            if channel in _TEXTS:
                self.buffered += len(text)
                written = self._texts.get((choice, channel))
                if written is None:
                    written = self._texts[choice, channel] = io.StringIO()
                written.write(text)
            elif channel == Channel.TOOL_CALL:
                self.buffered += len(text) + DELTA_BYTES
                self._calls.setdefault(choice, []).append(text)
        if delta.logprobs and self.job.params.logprobs:
            self.buffered += _logprobs_cost(delta.logprobs)
            self._logprobs.setdefault(choice, []).extend(delta.logprobs)
        return False

    def answer(self) -> CompleteAnswer:
        """Return the answer as collected so far. It is whole once the outcome is `Finished`."""
        return CompleteAnswer(
            {where: text.getvalue() for where, text in self._texts.items()},
            self._calls,
            self._logprobs,
            self.fingerprint,
        )

    def discard(self) -> None:
        """Discard the collected answer."""
        super().discard()
        self._empty()

    def _empty(self) -> None:
        self._texts: dict[tuple[int, int], io.StringIO] = {}
        self._calls: dict[int, list[str]] = {}
        self._logprobs: dict[int, list[Logprob]] = {}
        self.buffered = 0

    async def outcome_of(self) -> Outcome:
        """Wait for the outcome and return it."""
        while self.outcome is None:
            await self.wait()
        return self.outcome


_TEXTS = frozenset({int(Channel.CONTENT), int(Channel.REASONING)})


def _cost(delta: Delta) -> int:
    cost = DELTA_BYTES + sum(len(text) for _, text in delta.pieces)
    return cost + _logprobs_cost(delta.logprobs) if delta.logprobs else cost


def _logprobs_cost(logprobs: Iterable[Logprob]) -> int:
    return sum(
        LOGPROB_BYTES + len(one.token) + sum(LOGPROB_BYTES + len(token) for token, _ in one.top) for one in logprobs
    )
