"""Placement of a request on a node: filter, score and pick over one immutable view. Keeps the reason for every other
node.

Theory. `need` is the memory that the request adds on a node. It is a sum (`wire.capacity.arithmetic.request_need`). It
contains the KV of the prompt and of the expected output for every choice. It also contains the transient of a chunk,
and the weights of a model that is not loaded. A node is feasible only if all of this holds.

The node is ready, not cordoned, not draining and has a fresh report, and its engine runs. The node serves the model
with a context that is long enough. The node has not refused this request since its last report.
`wire.capacity.arithmetic.judge`, the arithmetic of the node's own gate, accepts `need` on top of the bytes reserved
there since the report.

No policy can override that filter: a policy only orders the feasible nodes.

A model that is not loaded costs its weights and its load time. While a node loads the weights, its report already
counts them. A node that cannot load a model is treated like a node without that model. When no node can load it,
waiting is useless and the request ends with the cause.

The balanced order compares in turn:

1. Room for two such requests or more (full marks), else room for one.
2. The shortest time.
3. The fewest requests in flight relative to the decode speed.
4. The largest share of the prompt in the prefix cache (`prefix_affinity`), which has already shortened the time.
5. The larger share of headroom.
6. Chance.

An idle node with the model loaded gets full marks wherever the request fits. Otherwise it would lose to a node with
more room that has to load the model. Ranking by plain bytes sends everything to the largest machine (simulated: median
wait 6.4 s instead of 3.1 s at 40 % load).

The time of a node is its expected time to the first token plus two costs. The first cost is the added wait of the
prompts queued behind it. The second, with less weight, is the duration of its answer next to the running rows, and the
time for which those rows stall. Prompts on a node alternate between the shortest and the oldest, and prefill is slower
while rows decode. A short prompt therefore does not wait for a long one. Its time is not the sum of all prompts in
front of it (simulated, a household: the median wait falls from 10.8 s to 3.9 s). When all decode rows are taken, enough
requests have to end first, and they end one at a time.

Before a node has counted the prompt, its tokens are an estimate: bytes of text divided by the model's measured ratio,
at most its context. "Can never fit" needs an exact count. It also requires that no member could hold the request,
including sleeping and absent members.
"""

import difflib
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Protocol

import msgspec

from router.placement.cluster_view import MAX_REPORT_AGE_SECONDS, ClusterView, NodeView
from router.placement.prefix_affinity import NOWHERE
from router.placement.reservations import NodeReservations, ReservationLedger
from wire.capacity.arithmetic import (
    KV_GROWTH_TOKENS,
    Fits,
    alone_bytes,
    can_ever_fit,
    headroom,
    judge,
    most_bytes,
    occupied,
    reading_bytes,
    request_need,
)
from wire.identity import NodeId
from wire.node_state import NodeState
from wire.refusals import MemoryNumbers, RefusalCode, Refused
from wire.report import ROW_COST, Memory, Model
from wire.units import show_size

HEADROOM_SATURATION = 2
"""Number of such requests for which room gets full marks. In simulations of tight memory 2 beats 4 and 8."""
PREFIX_HIT_SHARE = 0.5
"""Cached share of the prompt from which a node gets full marks wherever the request fits.

Most of the memory that such a request needs may already be in the cache, which makes room for it.
"""
MIN_LOAD_LEFT_SHARE = 0.1
"""Minimum share of a load that is left until the model is loaded: kernels and a first profile follow the weights."""
TTFT_STEP_SECONDS = 0.05
"""Resolution of the expected time in seconds: a smaller difference is noise of the measured speed."""
PREFILL_SLOWDOWN_WHILE_DECODING = 1.6
"""Factor by which prefill slows down while rows decode, because the rows keep their share of the machine."""
BUSY_STEPS = 4
"""Steps per doubling of in-flight requests relative to speed: machines of nearly the same speed count as equal."""
ANSWER_WEIGHT, ROW_WEIGHT = 0.3, 0.1
"""Weights of a second of the request's own answer and of a second for which another row stalls.

A second until the first token has weight 1. Simulated: larger weights make the slowest requests wait longer than
necessary, smaller weights delay the end of all answers.
"""
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0
"""Minimum and maximum of an estimated Retry-After, in seconds."""
UNKNOWN_RETRY_SECONDS = 2.0
"""Retry-After in seconds where no estimate exists."""
TOOLS, LOGPROBS, SAMPLING, GRAMMAR = "tools", "logprobs", "sampling", "grammar"
"""Optional features of a model that a request may need; used in `ResourceDemand.features` and `Model.features`."""
_MEANT = {SAMPLING: "top_k, min_p, penalties or logit_bias", GRAMMAR: "formats, strict tools or forced calls"}


class ResourceDemand(msgspec.Struct, frozen=True, gc=False):  # made for every request and node
    """Resources and features that a request needs on a node."""

    model: str
    prompt_bytes: int = 0
    prompt_tokens: int | None = None
    """Exact prompt tokens; None until a node has counted them."""
    max_tokens: int | None = None
    choices: int = 1
    features: frozenset[str] = frozenset()
    labels: frozenset[str] = frozenset()
    """Node labels that the API key requires."""
    written: int = 0
    """Generated tokens of the longest choice that are already known, because the answer began on another node."""

    def tokens_on(self, model: Model) -> int:
        """Return the prompt tokens on a model: the exact number, or an estimate that is at most the context."""
        if self.prompt_tokens is not None:
            return self.prompt_tokens
        estimate = math.ceil(self.prompt_bytes / model.bytes_per_token)
        return min(estimate, model.context) if model.context else estimate

    def output_on(self, model: Model, tokens: int) -> int:
        """Return the output tokens to reserve for each choice.

        That is the model's usual output, or `max_tokens` if that is less, and at most the context left after `tokens`
        of prompt.
        """
        usual = model.expected_output
        if self.written:
            usual = max(usual, self.written + KV_GROWTH_TOKENS)
        if self.max_tokens is not None and self.max_tokens < usual:
            usual = self.max_tokens
        context_left = model.context - tokens
        return usual if usual <= context_left or not model.context else max(1, context_left)


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """Placement arithmetic of one node for one request, as `consider` computes it."""

    node: NodeId
    name: str
    state: str
    why: str = ""
    """Reason why the node is infeasible; empty when it is feasible."""
    code: RefusalCode | None = None
    """Refusal code of `why`; None if the node is feasible."""
    need: int = 0
    """Bytes that the request needs on the node."""
    headroom: int | None = None
    """Bytes of headroom, less `withheld`; None if the memory of the node cannot be read."""
    withheld: int = 0
    """Bytes reserved on the node since its reading."""
    memory: Memory = Memory()
    prompt_tokens: int = 0
    output_tokens: int = 0
    """Output tokens to reserve for each choice."""
    expected_ttft: float = 0.0
    """Expected seconds to the first token."""
    in_flight: int = 0
    """Number of this router's requests on the node."""
    model: Model | None = None
    weights: int = 0
    """Part of `need` that a load takes, in bytes."""
    warm: float = 0.0
    """Share of the prompt that is probably in the node's prefix cache, 0 to 1."""
    ahead: int = 0
    """Queued tokens in front of this request."""
    reading: int = 0
    """Tokens that the node must prefill for this request: those that are probably not cached."""
    expected_answer: float = 0.0
    """Expected seconds from the first token to the last."""
    delay: float = 0.0
    """Seconds by which this request delays the other requests of the node."""

    @property
    def feasible(self) -> bool:
        """Whether the node can take the request now."""
        return not self.why

    @property
    def idle(self) -> bool:
        """Whether the node has the model loaded and no work."""
        return self.model is not None and self.model.loaded and not self.in_flight and not self.ahead

    @property
    def most(self) -> int:
        """Bytes that the node could give a request that runs alone on it."""
        return most_bytes(self.memory)

    def numbers(self) -> MemoryNumbers:
        """Return the memory arithmetic of the candidate in bytes, as in `error.memory` of an answer."""
        memory = self.memory
        now = occupied(memory)
        reserved = memory.reserved + self.withheld
        predicted = None if now is None else now + reserved + self.need + memory.margin
        return MemoryNumbers(
            predicted,
            memory.ceiling,
            now,
            reserved,
            self.need,
            memory.margin,
            memory.cap,
            self.headroom,
            memory.bound_by,
        )


class Placement(msgspec.Struct, frozen=True, gc=False):
    """Chosen node for a request, with the arithmetic of every examined node."""

    chosen: Candidate
    candidates: tuple[Candidate, ...]


class NoPlacement(msgspec.Struct, frozen=True, gc=False):
    """Result without a node: the refusal, with the arithmetic of every examined node."""

    refused: Refused
    candidates: tuple[Candidate, ...]
    candidate: Candidate | None = None
    """Node that gets the request all the same, without a reservation, because only that node can know; None if there is
    none.

    There are two cases. By the estimate no member could ever hold the request, and this node can count it exactly. Or
    the model is loaded nowhere, and this node may unload idle models for it.
    """


class AttemptHistory(msgspec.Struct, frozen=True, gc=False):
    """Earlier attempts of a request, which exclude nodes from the next attempt."""

    refused: Mapping[NodeId, float] = msgspec.field(default_factory=dict[NodeId, float])
    """Nodes that refused the request, with the arrival time of the report under which they refused."""
    never: Mapping[NodeId, Refused] = msgspec.field(default_factory=dict[NodeId, Refused])
    """Nodes that answered that they could never hold the request, with their refusals."""
    lost: Collection[NodeId] = ()
    """Nodes that were lost with the request."""
    waiting: int = -1
    """Number of the waiting request, whose own hold does not count against it; -1 for none."""
    fingerprint: str = ""
    """Fingerprint of the only model that may take the request; empty allows any.

    It is the model that began the answer, or the served model of a name with several.
    """


FIRST = AttemptHistory()


class HeadroomCorrection(msgspec.Struct, frozen=True, gc=False):
    """Maximum headroom in bytes of a node that refused a request although its view had room.

    `reported_at` is the arrival of the report to which the correction applies; the next report ends it.
    """

    reported_at: float
    headroom: int


class Policy(Protocol):
    """Order of feasible nodes. The smallest tuple wins; chance decides between equal tuples."""

    def score(self, candidate: Candidate, request: ResourceDemand) -> tuple[float, ...]:
        """Return the rank of a feasible node for a request; smaller is better."""
        ...


class Balanced:
    """Policy `balanced`: enough headroom first, then the shortest time, which includes the delay of other requests."""

    def score(self, candidate: Candidate, request: ResourceDemand) -> tuple[float, ...]:
        """Rank by headroom up to `HEADROOM_SATURATION` such requests, then by time.

        Further criteria are requests in flight relative to speed, cached share of the prompt, and share of headroom.
        """
        headroom, need, memory = candidate.headroom or 0, candidate.need, candidate.memory
        marks = HEADROOM_SATURATION
        if candidate.warm < PREFIX_HIT_SHARE and headroom < HEADROOM_SATURATION * need and not candidate.idle:
            marks = headroom // need
        fraction = headroom / max(1, memory.ceiling - memory.margin)
        time = candidate.expected_ttft + candidate.delay + ANSWER_WEIGHT * candidate.expected_answer
        speed = candidate.model.decode_speed if candidate.model else 1.0
        busy = math.floor(BUSY_STEPS * math.log2((candidate.in_flight + 1) / speed))
        return (-marks, time // TTFT_STEP_SECONDS, busy, -candidate.warm, -fraction)


class MostHeadroom:
    """Policy `most_headroom`: the node with most bytes of headroom wins."""

    def score(self, candidate: Candidate, request: ResourceDemand) -> tuple[float, ...]:
        """Rank by headroom in bytes, then requests in flight."""
        return (-(candidate.headroom or 0), candidate.in_flight)


POLICIES: Mapping[str, Policy] = MappingProxyType({"balanced": Balanced(), "most_headroom": MostHeadroom()})


def place(
    view: ClusterView,
    request: ResourceDemand,
    ledger: ReservationLedger,
    *,
    now: float,
    draw: Callable[[], float],
    policy: Policy = POLICIES["balanced"],
    corrections: Mapping[NodeId, HeadroomCorrection] = MappingProxyType({}),
    trials: AttemptHistory = FIRST,
    warm: Mapping[NodeId, float] = NOWHERE,
) -> Placement | NoPlacement:
    """Pick a node for a request, or return the refusal with the reason.

    `now` is in monotonic seconds of the clock of `reported_at`. `draw` returns numbers in [0, 1) for ties.
    `corrections` limit the headroom of nodes that have just refused. `warm` maps nodes to the share of the prompt in
    their prefix cache.
    """
    seen = tuple([consider(node, request, ledger, now, corrections, trials, warm) for node in view.nodes])
    feasible = [candidate for candidate in seen if not candidate.why]
    if not feasible:
        return _refuse(view, request, seen, trials)
    if len(feasible) == 1:
        return Placement(feasible[0], seen)
    ranks = [(*policy.score(one, request), draw()) for one in feasible]
    return Placement(feasible[ranks.index(min(ranks))], seen)


def consider(
    node: NodeView,
    request: ResourceDemand,
    ledger: ReservationLedger,
    now: float,
    corrections: Mapping[NodeId, HeadroomCorrection],
    trials: AttemptHistory,
    warm: Mapping[NodeId, float],
) -> Candidate:
    """Compute the placement arithmetic of one node for a request, with the reason if the node is infeasible.

    Arguments are those of `place`.
    """
    if not request.labels <= node.labels:
        missing_labels = ", ".join(sorted(request.labels - node.labels))
        return Candidate(node.id, node.name, node.state, f"has no label {missing_labels}", RefusalCode.NOT_ALLOWED)
    model = node.models.get(request.model)
    if model is None:
        return Candidate(node.id, node.name, node.state, f"does not serve {request.model}", RefusalCode.NO_MODEL)
    tokens = request.tokens_on(model)
    output = request.output_on(model, tokens)
    tokenizing = reading_bytes(request.prompt_bytes, context=model.context)
    need = max(request_need(model, tokens, output, request.choices), tokenizing)
    weights = 0 if model.loaded else model.weights
    if weights and node.is_loading(model):
        need, weights = need - weights, 0
    withheld = ledger.unacknowledged(node.id, trials.waiting)
    if node.id in corrections:
        withheld += _withheld(node, ledger, corrections[node.id])
    why, code = _unfit(node, model, request, now, trials)
    memory, headroom = node.memory, node.headroom  # as in `judge`: the reading is constant until the next report
    if headroom is not None and memory.guard and need <= headroom - withheld:
        headroom -= withheld
    else:
        verdict = judge(memory, need, unacknowledged=withheld, node=node.name)
        if isinstance(verdict, Fits):
            headroom = need  # the node's guard is off
        else:
            headroom = verdict.numbers.headroom if verdict.numbers is not None else None
            if not why:
                why, code = verdict.message, verdict.code
    turn = None if why else ledger.turns.get(node.id)
    if turn is not None and not request.written and turn.bars(model.name, model.loaded):
        why, code = (
            f"makes room for {turn.model}: it takes no new requests for {model.name} until {turn.model} is loaded",
            RefusalCode.NO_ROOM,
        )
    account, speed, engine = ledger.account(node.id), model.prefill_speed, node.engine
    known = warm.get(node.id, 0.0) if model.loaded else 0.0
    reading = round(tokens * (1.0 - known)) + request.written
    ahead = engine.queued_tokens + account.tokens
    ttft, delay = prefill_wait(account, ahead, reading, speed)
    if engine.running:
        ttft *= PREFILL_SLOWDOWN_WHILE_DECODING
        delay += ROW_WEIGHT * engine.running * reading / speed
    if not model.loaded:
        read = model.progress or 0.5  # without a reported progress, half of the load is left on average
        ttft += model.load_seconds * (max(MIN_LOAD_LEFT_SHARE, 1.0 - read) if model.loading else 1.0)
    taken, most = account.rows, engine.rows
    answer = output / model.decode_speed * (1.0 + ROW_COST * taken)
    if taken + request.choices > most > 0:
        ttft += (taken + request.choices - most) * answer / most
    return Candidate(
        node.id,
        node.name,
        node.state,
        why,
        code,
        need,
        headroom,
        withheld,
        memory,
        tokens,
        output,
        ttft,
        len(account.requests),
        model,
        weights,
        known,
        ahead,
        reading,
        answer,
        delay,
    )


def prefill_wait(account: NodeReservations, ahead: int, reading: int, speed: float) -> tuple[float, float]:
    """Return two times in seconds: until a prompt of `reading` tokens is prefilled, and the wait that it adds to other
    prompts.

    The prompts of a node alternate between the shortest and the oldest. `ahead` is the number of tokens in front. It
    covers the rest of the account's unfinished prompts; any surplus belongs to unknown prompts, which count as long
    ones. `speed` is in prompt tokens per second.
    """
    mine, others, known = reading / speed, ahead / speed, account.unread_tokens
    if not known or others < TTFT_STEP_SECONDS / 2:  # below the noise of the measured speed
        return mine + others, 0.0
    left = min(1.0, ahead / known)
    shorter, longer, behind = mine, max(0, ahead - known) / speed, 0
    for one in account.unread.values():
        seconds = one.seconds * left
        if seconds <= mine:
            shorter += seconds
        else:
            longer += seconds
            behind += 1
    return shorter + min(shorter, longer), behind * mine


def _withheld(node: NodeView, ledger: ReservationLedger, correction: HeadroomCorrection) -> int:
    """Return the bytes by which the view still overstates a node that has just refused."""
    if correction.reported_at != node.reported_at:
        return 0
    memory = node.memory
    now = occupied(memory)
    free_bytes = headroom(memory.ceiling, memory.margin, now, memory.reserved + ledger.unacknowledged(node.id))
    return 0 if free_bytes is None else max(0, free_bytes - correction.headroom)


_FIT: tuple[str, RefusalCode | None] = ("", None)


def _unfit(
    node: NodeView, model: Model, request: ResourceDemand, now: float, trials: AttemptHistory
) -> tuple[str, RefusalCode | None]:
    """Return the reason and code why a node is infeasible regardless of memory; an empty reason when it is feasible."""
    why = unavailable_reason(node, now)
    if why is not _FIT:
        return why
    if model.cause:
        return f"cannot load {model.name}: {model.cause}", RefusalCode.LOAD_FAILED
    if request.features and not request.features.issubset(model.features):
        return f"its {model.name} has no {', '.join(sorted(request.features.difference(model.features)))}", (
            RefusalCode.UNSUPPORTED
        )
    if _too_long(model, request):
        return f"its context is {model.context} tokens, the prompt has {request.prompt_tokens}", RefusalCode.CONTEXT
    return _FIT if trials is FIRST else _tried(node, model, trials)


def unavailable_reason(node: NodeView, now: float) -> tuple[str, RefusalCode | None]:
    """Return the reason and code why a node takes no request at all now. The reason is empty and the code None if it
    does.

    `now` is in monotonic seconds.
    """
    if node.state == NodeState.PAUSED:
        return f"is paused: {node.sharing.why}", RefusalCode.DRAINING
    if node.state != NodeState.READY:
        return f"is {node.state}", RefusalCode.NOT_READY
    if node.cordoned:
        return "is cordoned", RefusalCode.NOT_READY
    if node.draining:
        return "is draining", RefusalCode.DRAINING
    if now - node.reported_at > MAX_REPORT_AGE_SECONDS:
        return f"sent its last report {now - node.reported_at:.1f} s ago", RefusalCode.NOT_READY
    engine = node.engine
    if engine.state != "ready":
        return f"its engine is {engine.state}" + (f": {engine.cause}" if engine.cause else ""), RefusalCode.NOT_READY
    return _FIT


def _tried(node: NodeView, model: Model, trials: AttemptHistory) -> tuple[str, RefusalCode | None]:
    if trials.fingerprint and trials.fingerprint != model.fingerprint:
        return f"its {model.name} is another model: {_short(model.fingerprint)}, not {_short(trials.fingerprint)}", (
            RefusalCode.NOT_READY
        )
    if node.id in trials.lost:
        return "was lost with this request", RefusalCode.NOT_READY
    if node.id in trials.never:
        return f"refused this request permanently: {trials.never[node.id].message}", trials.never[node.id].code
    if trials.refused.get(node.id) == node.reported_at:
        return "refused this request and has not reported since", RefusalCode.NO_ROOM
    return _FIT


def _short(fingerprint: str) -> str:
    return f"fingerprint {fingerprint[:8] or 'unknown'}"


def _too_long(model: Model, request: ResourceDemand) -> bool:
    return bool(model.context) and request.prompt_tokens is not None and request.prompt_tokens >= model.context


# refusals


def _refuse(
    view: ClusterView, request: ResourceDemand, seen: tuple[Candidate, ...], trials: AttemptHistory
) -> NoPlacement:
    all_known = [node for node in view.nodes if request.model in node.models]
    if not all_known:
        return NoPlacement(_no_model(view, request), seen)
    known = [node for node in all_known if request.labels <= node.labels]
    if not known:
        text = f"no node with the labels that this API key is bound to ({', '.join(sorted(request.labels))}) serves"
        return NoPlacement(Refused(RefusalCode.NOT_ALLOWED, f"{text} {request.model}"), seen)
    causes = {node.id: cause for node in known if (cause := _broken(node, request, trials))}
    serving = [node for node in known if node.id not in causes]
    if not serving:
        return NoPlacement(_load_failed(known, request, causes), seen)
    offers = [candidate for candidate in seen if candidate.model is not None and candidate.node not in causes]
    missing = _missing(serving, request)
    if missing:
        return NoPlacement(Refused(RefusalCode.UNSUPPORTED, f"no node supports {missing} with {request.model}"), seen)
    if request.prompt_tokens is not None or all(node.id in trials.never for node in serving):
        final = _never(serving, request, offers, trials)
        if final is not None:
            return NoPlacement(final, seen)
    decider = _counter(serving, request, offers, trials) or _emptier(serving, offers, trials)
    return NoPlacement(_not_now(request, offers), seen, decider)


def _broken(node: NodeView, request: ResourceDemand, trials: AttemptHistory) -> str:
    """Return why a node cannot load the model, by its report or its answer to this request; empty if it can."""
    failure = trials.never.get(node.id)
    if failure is not None and failure.code is RefusalCode.LOAD_FAILED:
        return failure.message.removeprefix(f"{request.model} cannot be loaded: ")
    return node.models[request.model].cause


def _load_failed(known: list[NodeView], request: ResourceDemand, causes: Mapping[NodeId, str]) -> Refused:
    details = "; ".join(f"{node.name}: {causes[node.id]}" for node in known[:4])
    more = f"; and {len(known) - 4} more" if len(known) > 4 else ""
    text = f"no node can load {request.model}: {details}{more}"
    return Refused(RefusalCode.LOAD_FAILED, text, None, None, known[0].name if len(known) == 1 else "")


def _missing(serving: list[NodeView], request: ResourceDemand) -> str:
    """Name the features that no member offers with this model, in any state; empty when one member offers all."""
    offered = [frozenset(node.models[request.model].features) for node in serving]
    if any(request.features <= features for features in offered):
        return ""
    missing = request.features.difference(*offered) or request.features
    return " and ".join(_MEANT.get(feature, feature) for feature in sorted(missing))


def _no_model(view: ClusterView, request: ResourceDemand) -> Refused:
    if any(package.name == request.model for node in view.nodes for package in node.video.packages):
        return Refused(
            RefusalCode.INVALID, f"the model {request.model!r} generates videos, not text: use POST /v1/videos"
        )
    known = view.models()
    if not known:
        return Refused(
            RefusalCode.NOT_READY,
            "no node has reported a model yet: `cluster nodes` lists the nodes, `cluster join` adds a machine",
            None,
            UNKNOWN_RETRY_SECONDS,
        )
    near = difflib.get_close_matches(request.model[:256], known, 3, 0.4) or sorted(known)[:3]
    return Refused(
        RefusalCode.NO_MODEL,
        f"no node serves the model {request.model[:256]!r}; the nearest names are {', '.join(near)}",
    )


def _never(
    serving: list[NodeView], request: ResourceDemand, offers: list[Candidate], trials: AttemptHistory
) -> Refused | None:
    """Return the refusal if no member could ever hold the request; None as long as one could."""
    if any(_ever(node, request, trials) for node in serving):
        return None
    longest = max(node.models[request.model].context for node in serving)
    failures = [trials.never[node.id] for node in serving if node.id in trials.never]
    failures = [refused for refused in failures if refused.code is not RefusalCode.TOO_LARGE]
    if request.prompt_tokens is not None and longest and request.prompt_tokens >= longest:
        return Refused(
            RefusalCode.CONTEXT,
            f"the prompt has {request.prompt_tokens} tokens, the longest context of "
            f"{request.model} in this cluster is {longest}: shorten the prompt",
        )
    if len(failures) == len(serving):
        return failures[0]
    best = max(offers, key=lambda one: one.most)
    return Refused(
        RefusalCode.TOO_LARGE,
        f"needs {show_size(_alone(best, request))} on an idle node, the largest node can give "
        f"{show_size(best.most)} ({best.name}): shorten the prompt, lower max_tokens or use a smaller "
        f"variant of {request.model}",
        best.numbers(),
        None,
        best.name,
    )


def _ever(node: NodeView, request: ResourceDemand, trials: AttemptHistory) -> bool:
    model = node.models[request.model]
    if node.id in trials.never or _too_long(model, request):
        return False
    tokens = request.tokens_on(model)
    return can_ever_fit(node.memory, model, tokens, request.output_on(model, tokens), request.choices)


def _alone(candidate: Candidate, request: ResourceDemand) -> int:
    model = candidate.model
    assert model is not None  # noqa: S101  offers are candidates that serve the model
    return alone_bytes(model, candidate.prompt_tokens, candidate.output_tokens, request.choices)


def _counter(
    serving: list[NodeView], request: ResourceDemand, offers: list[Candidate], trials: AttemptHistory
) -> Candidate | None:
    """Choose the roomiest node to count a prompt that, by the estimate, fits on no member even when all are idle."""
    if any(_ever(node, request, trials) for node in serving):
        return None
    able = [
        candidate
        for candidate in offers
        if candidate.code is RefusalCode.NO_ROOM and candidate.node not in trials.refused
    ]
    return max(able, key=lambda one: one.most, default=None)


def _emptier(serving: list[NodeView], offers: list[Candidate], trials: AttemptHistory) -> Candidate | None:
    """Choose an idle, large enough node that could hold the model after unloading unused models.

    Return None while some present node has the model loaded or loading, because the request then only has to wait.
    """
    if any(one.code in _MEMORY and one.model and (one.model.loaded or one.model.loading) for one in offers):
        return None
    idle = {
        node.id
        for node in serving
        if not node.engine.running + node.engine.waiting and any(model.loaded for model in node.models.values())
    }
    able = [
        one
        for one in offers
        if one.code is RefusalCode.NO_ROOM
        and one.node in idle
        and not one.in_flight
        and one.need <= one.most
        and one.node not in trials.refused
    ]
    return max(able, key=lambda one: (one.headroom or 0) - one.need, default=None)


_MEMORY = frozenset({RefusalCode.NO_ROOM, RefusalCode.UNREADABLE})


def _not_now(request: ResourceDemand, offers: list[Candidate]) -> Refused:
    short = [candidate for candidate in offers if candidate.code in _MEMORY]
    if not short:
        return _none_serves(request, offers)
    best = max(short, key=lambda one: -math.inf if one.headroom is None else one.headroom - one.need)
    count = "" if request.prompt_tokens is not None else " by estimate"
    if best.code is RefusalCode.UNREADABLE:
        text = f"the memory of {best.name} cannot be read; it starts no requests until then: retry"
        return Refused(RefusalCode.UNREADABLE, text, best.numbers(), UNKNOWN_RETRY_SECONDS, best.name)
    text = (
        f"needs {show_size(best.need)}{count}, best node {best.name} has {show_size(best.headroom)}: retry, shorten "
        f"the prompt, lower max_tokens or use a smaller variant of {request.model}"
    )
    return Refused(RefusalCode.NO_ROOM, text, best.numbers(), retry_after(best), best.name)


def _none_serves(request: ResourceDemand, offers: list[Candidate]) -> Refused:
    draining = all(candidate.code is RefusalCode.DRAINING for candidate in offers)
    reasons = "; ".join(f"{candidate.name} {candidate.why}" for candidate in offers[:4])
    return Refused(
        RefusalCode.DRAINING if draining else RefusalCode.NOT_READY,
        f"no node can serve {request.model} now: {reasons}",
        None,
        UNKNOWN_RETRY_SECONDS,
    )


def retry_after(candidate: Candidate) -> float:
    """Estimate the seconds until a full node has room, because one of its requests ends: 1 s to 60 s.

    Without a request or model to estimate from, return `UNKNOWN_RETRY_SECONDS`.
    """
    model = candidate.model
    if model is None or candidate.in_flight == 0:
        return UNKNOWN_RETRY_SECONDS
    answer = model.expected_output / model.decode_speed
    return min(MAX_RETRY_SECONDS, max(MIN_RETRY_SECONDS, answer / candidate.in_flight))


def explain(candidates: Iterable[Candidate], chosen: NodeId | None) -> list[dict[str, object]]:
    """Return the arithmetic of each candidate as a plain row, for `cluster place` and `cluster explain`."""
    return [_row(candidate, candidate.node == chosen) for candidate in candidates]


def _row(candidate: Candidate, chosen: bool) -> dict[str, object]:
    numbers = candidate.numbers()
    return {
        "node": candidate.node,
        "name": candidate.name,
        "state": candidate.state,
        "chosen": chosen,
        "feasible": candidate.feasible,
        "why_not": candidate.why,
        "code": None if candidate.code is None else candidate.code.value,
        "need": candidate.need,
        "unacknowledged": candidate.withheld,
        **{name: value for name, value in msgspec.structs.asdict(numbers).items() if name != "estimate"},
        "prompt_tokens": candidate.prompt_tokens,
        "expected_output": candidate.output_tokens,
        "expected_ttft_seconds": round(candidate.expected_ttft, 3),
        "expected_answer_seconds": round(candidate.expected_answer, 3),
        "delay_seconds": round(candidate.delay, 3),
        "known_share": round(candidate.warm, 3),
        "in_flight": candidate.in_flight,
    }
