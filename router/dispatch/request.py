"""One request from the door to its end, as its two sides see it: the dispatcher adds and flushes, one reader takes.

Deltas of one frame are added, then every touched ticket is flushed once: a stream's sink is called, or a reader that
waits is woken through one Future. No clock is read, no task is made and nothing is counted per token as long as the
reader keeps up; `takes` tells the dispatcher's sweep whether it does.
"""

import asyncio
import io
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from router.admission.queue import Entry
from router.admission.rate_limits import Rate
from router.placement.place import FIRST, Demand, Trials
from router.placement.prefix_affinity import NOWHERE, Chain
from router.placement.recovery import MOST_KNOWN
from wire.capacity.fairness import Owner
from wire.frames import Channel, Delta, Finished, Logprob, Message, Params
from wire.identity import NodeId
from wire.refusals import Refused

MOST_STEPS = 64
DELTA_BYTES = 256
"""What one waiting delta, and one kept tool call, costs besides its text."""
LOGPROB_BYTES = 96
"""What one token's log probability, or one alternative, costs besides the token."""
MOST_TAKEN = 256
"""Deltas given out at once, so that a reader who is slow but reads shows progress."""
LONGEST_WHOLE = 32 * 1024 * 1024
"""Characters of one answer that is not streamed; log probabilities count as what they cost."""


class Job(msgspec.Struct, frozen=True, gc=False):
    """What a dialect asks for: the parts of Generate, whose it is, and how it will be read. `created` in seconds since
    1970, `session` the conversation's name if its client gave one, `ignored` the fields and tools of its body that
    change nothing."""

    demand: Demand
    key: str
    request_id: str
    messages: tuple[Message, ...]
    params: Params
    created: int
    stream: bool
    tools: str = ""
    template: str = ""
    include_usage: bool = False
    text: str = ""
    ids: tuple[int, ...] = ()
    session: str = ""
    ignored: tuple[str, ...] = ()


class Answer(msgspec.Struct, frozen=True, gc=False):
    """What was said of an answer that is not streamed: texts by choice and channel, tool calls (the nodes' JSON) and
    log probabilities by choice, and the fingerprint of the model that said it."""

    texts: Mapping[tuple[int, int], str]
    calls: Mapping[int, Sequence[str]]
    logprobs: Mapping[int, Sequence[Logprob]]
    fingerprint: str = ""


class Failure(msgspec.Struct, frozen=True, gc=False):
    """A request that was begun and broke: a machine-readable code and a sentence."""

    code: str
    message: str


Outcome = Finished | Refused | Failure
SWAP = "waiting for a model swap"
CANCELLED = Failure("cancelled", "nobody waits for this any more")
SLOW = Failure("slow_client", "the client did not read its stream")


class Ticket:
    """Base of both kinds: where the request is, what it has met, how it ended."""

    __slots__ = (
        "arrived", "asked", "attempts", "begun", "chain", "charged", "crashes", "deadline", "demand", "entry", "fallen",
        "fingerprint", "first_at", "forgotten", "heard", "held", "in_a_row", "job", "losses", "lost", "never", "node",
        "node_name", "number", "opened", "outcome", "owner", "params", "queued_at", "rates", "read", "refused",
        "request", "sink", "steps", "swap", "waiter", "warm",
    )  # fmt: skip

    def __init__(self, job: Job, owner: Owner, number: int, now: float) -> None:
        self.job = job
        self.owner = owner
        self.number = number
        self.demand = job.demand
        self.arrived = now
        self.outcome: Outcome | None = None
        self.waiter: asyncio.Future[None] | None = None
        self.sink: Callable[[], None] | None = None
        self.chain: Chain | None = None
        self.warm = NOWHERE
        # where it is
        self.request = 0
        self.node: NodeId | None = None
        self.node_name = ""
        self.entry: Entry[Ticket] | None = None
        self.queued_at = 0.0
        self.swap = ""  # which model swap it waits for in the queue
        self.deadline: float | None = None
        # what it has met
        self.attempts = 0
        self.in_a_row = 0
        self.losses = 0
        self.crashes = 0
        self.refused: dict[NodeId, float] = {}
        self.never: dict[NodeId, Refused] = {}
        self.lost: set[NodeId] = set()
        self.fallen: Failure | None = None
        self.first_at: float | None = None
        # what was heard of each choice, and of which model: what another node needs to go on
        self.params = job.params
        self.heard: list[list[int]] = [[] for _ in range(max(1, job.params.n))]
        self.fingerprint = ""
        # what it took, whoever ends it: the prompt's tokens and those of them that a cache had, ids not remembered
        self.read: tuple[int, int] = (0, 0)
        self.forgotten = 0
        # its reader
        self.opened = False
        self.begun = False
        self.held = 0
        self.charged: int | None = None
        self.asked = 0
        self.steps: list[tuple[float, str, str]] = []
        self.rates: tuple[Rate, ...] = ()

    def mark(self, now: float, what: str, node: str = "") -> None:
        """Remember a step of its way, `now` in monotonic seconds; the first and the last of too many."""
        if len(self.steps) >= MOST_STEPS:
            del self.steps[MOST_STEPS // 2]
        self.steps.append((now - self.arrived, what, node))

    def trials(self) -> Trials:
        """Give what placement must know of earlier attempts."""
        if not self.attempts and self.entry is None:  # who waits must not be kept out by the room kept for it
            return FIRST
        return Trials(self.refused, self.never, self.lost, self.number, self.fingerprint if self.written else "")

    @property
    def waits_for(self) -> str:
        """Return what a client is shown of a wait: neither nodes nor models, which its key may not use."""
        return SWAP if self.swap else ""

    @property
    def written(self) -> int:
        """Tokens of the longest answer that were heard."""
        return max(map(len, self.heard), default=0)

    @property
    def wrote(self) -> int:
        """Tokens of all choices that were heard."""
        return self.forgotten + sum(map(len, self.heard))

    @property
    def resumable(self) -> bool:
        """Whether another node that has the same model could go on with the answer."""
        return bool(self.fingerprint) and self.written > 0

    def known(self) -> tuple[tuple[int, ...], ...]:
        """Give the ids heard of each choice; nothing while none was."""
        return tuple(map(tuple, self.heard)) if self.written else ()

    def hears(self, delta: Delta) -> None:
        """Remember a delta's ids. A choice that nobody asked for spoils them: the answer cannot be resumed."""
        try:
            self.heard[delta.choice] += delta.ids
        except IndexError:
            self.spoil(delta)

    def spoil(self, delta: Delta | None = None) -> None:
        """Remember no ids any more, only how many there were."""
        self.forgotten = self.wrote + (0 if delta is None else len(delta.ids))
        self.heard = []

    def bound(self) -> None:
        """Remember no more than was asked for: a node that says more is not to be believed anyway."""
        if self.written > (self.params.max_tokens or MOST_KNOWN):
            self.spoil()

    def add(self, delta: Delta) -> bool:
        """Take one delta from the node; True when `flush` must follow after the last of its frame."""
        raise NotImplementedError

    def discard(self) -> None:
        """Forget what was said; nothing of it has gone out, and it begins anew."""
        self.forgotten = 0
        self.heard = [[] for _ in range(max(1, self.params.n))]

    def flush(self) -> None:
        """Call the sink, or wake a reader that waits."""
        if self.sink is not None:
            self.sink()
            return
        waiter = self.waiter
        if waiter is not None:
            self.waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def end(self, outcome: Outcome) -> None:
        """Set how it ended, once, and tell the reader."""
        if self.outcome is None:
            self.outcome = outcome
            self.flush()

    def wait(self) -> asyncio.Future[None]:
        """Give a Future that is done at the next flush."""
        self.waiter = asyncio.get_running_loop().create_future()
        return self.waiter


class StreamTicket(Ticket):
    """Read as it comes. `held` are the bytes that wait for a reader that is `blocked`."""

    __slots__ = ("blocked", "nudged", "pending", "seen_takes", "still", "takes")

    def __init__(self, job: Job, owner: Owner, number: int, now: float) -> None:
        super().__init__(job, owner, number, now)
        self.pending: list[Delta] = []
        self.blocked = True
        self.nudged = False
        self.takes = 0
        self.seen_takes = 0
        self.still = 0.0

    @property
    def ready(self) -> bool:
        """Whether there is something to take: deltas, the end, or a nudge to show a sign of life."""
        return bool(self.pending) or self.outcome is not None or self.nudged

    def add(self, delta: Delta) -> bool:
        """Put one delta where the reader finds it."""
        try:  # as `hears` does, without the call: every token of a stream passes here
            self.heard[delta.choice] += delta.ids
        except IndexError:
            self.spoil(delta)
        pending = self.pending
        pending.append(delta)
        if self.blocked:
            self.held += _cost(delta)
        return len(pending) == 1

    def take(self) -> list[Delta]:
        """Give what has come, in order; the rest stays when it is much. Clears a nudge."""
        self.takes += 1
        self.nudged = False
        taken = self.pending
        if not taken:
            return taken
        self.begun = True
        self.pending = []
        if len(taken) > MOST_TAKEN:
            self.pending = taken[MOST_TAKEN:]
            del taken[MOST_TAKEN:]
        if self.held:
            self.held = sum(_cost(delta) for delta in self.pending)
        return taken

    def discard(self) -> None:
        """Forget what was said and not taken."""
        super().discard()
        self.drop()

    def drop(self) -> None:
        """Forget what waits for a reader who does not read; it was written all the same."""
        self.pending = []
        self.held = 0


class WholeTicket(Ticket):
    """Read once, at the end. `held` are the characters collected."""

    __slots__ = ("_calls", "_logprobs", "_texts")

    def __init__(self, job: Job, owner: Owner, number: int, now: float) -> None:
        super().__init__(job, owner, number, now)
        self._empty()

    def add(self, delta: Delta) -> bool:
        """Collect what was asked for; deltas themselves are not kept."""
        choice = delta.choice
        if not 0 <= choice < self.job.params.n:
            return False
        self.hears(delta)
        for channel, text in delta.pieces:
            if channel in _TEXTS:
                self.held += len(text)
                written = self._texts.get((choice, channel))
                if written is None:
                    written = self._texts[choice, channel] = io.StringIO()
                written.write(text)
            elif channel == Channel.TOOL_CALL:
                self.held += len(text) + DELTA_BYTES
                self._calls.setdefault(choice, []).append(text)
        if delta.logprobs and self.job.params.logprobs:
            self.held += _logprobs_cost(delta.logprobs)
            self._logprobs.setdefault(choice, []).extend(delta.logprobs)
        return False

    def answer(self) -> Answer:
        """Give all that was said."""
        return Answer({where: text.getvalue() for where, text in self._texts.items()}, self._calls, self._logprobs,
                      self.fingerprint)  # fmt: skip

    def discard(self) -> None:
        """Forget what was said."""
        super().discard()
        self._empty()

    def _empty(self) -> None:
        self._texts: dict[tuple[int, int], io.StringIO] = {}
        self._calls: dict[int, list[str]] = {}
        self._logprobs: dict[int, list[Logprob]] = {}
        self.held = 0

    async def outcome_of(self) -> Outcome:
        """Wait for the end."""
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
