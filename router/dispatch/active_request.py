"""Dispatcher's side of a request, from arrival to end: its state, the nodes it has tried, and its received token ids.

The reader's side is `answer.Answer`, which the dispatcher fills and the reader empties.
"""

from collections.abc import Mapping

from msgspec.structs import replace

from router.admission.queue import QueuedRequest
from router.admission.rate_limits import RateState, estimate_probable_tokens
from router.dispatch.aliases.candidates import AliasCandidates, CandidateState
from router.dispatch.aliases.tried_nodes import TriedNodes
from router.dispatch.answer import CollectedAnswer, StreamedAnswer, VectorsAnswer
from router.dispatch.generated_tokens import GeneratedTokens
from router.dispatch.request import SWAP, Outcome, RequestSpec
from router.dispatch.request_events import Action, Event
from router.dispatch.request_state import ON_NODE, RequestLife, RequestState, step
from router.placement.candidate import FIRST, AttemptHistory, ResourceDemand
from router.placement.prefix_affinity import NOWHERE, PrefixHashChain
from wire.capacity.fairness import WeightedKey
from wire.frames import Delta, GenerationParams
from wire.identity import NodeId
from wire.models.version import UNKNOWN_VERSION, ModelVersion

_STREAMING = RequestState.STREAMING
MAX_STEPS = 64
"""Maximum number of steps in the history of a request."""


class ActiveRequest:
    """Request of a client in the dispatcher.

    `number` orders requests by arrival. `now` is the time of arrival in monotonic seconds. `demand` and `params`
    default to those of `spec`. `charged` is the number of tokens charged to the key's quota; None if the quota refused
    the request or was not charged. `rates` is the state of the key's rates after the charge; empty without rates.
    `chain` has the hashes of the prompt; None if placement does not use them. `cached_shares` maps nodes to the share
    of the prompt in their prefix cache, 0 to 1. `alias` has the candidates of the alias that the client named; None if
    it named none.

    The attribute `life` is the state of the request and of its attempts. `tried` has the nodes that placement excludes.
    `tokens` has the token ids received so far. `answer` passes deltas and the outcome to the reader, which sends them
    to the client.
    """

    __slots__ = (
        "alias",
        "answer",
        "arrived",
        "cached_shares",
        "chain",
        "charged",
        "deadline",
        "demand",
        "entry",
        "estimated_tokens",
        "life",
        "node",
        "number",
        "params",
        "prompt_counts",
        "rates",
        "spec",
        "steps",
        "streaming",
        "swap",
        "tokens",
        "tried",
        "version",
        "weighted_key",
    )

    def __init__(
        self,
        spec: RequestSpec,
        weighted_key: WeightedKey,
        number: int,
        now: float,
        *,
        demand: ResourceDemand | None = None,
        params: GenerationParams | None = None,
        charged: int | None = None,
        rates: tuple[RateState, ...] = (),
        chain: PrefixHashChain | None = None,
        cached_shares: Mapping[NodeId, float] = NOWHERE,
        alias: AliasCandidates | None = None,
    ) -> None:
        self.spec: RequestSpec = spec
        self.weighted_key = weighted_key
        self.number = number
        self.arrived = now
        self.demand: ResourceDemand = demand or spec.demand
        self.params = params or spec.params
        self.charged = charged
        self.rates = rates
        self.chain: PrefixHashChain | None = chain
        self.cached_shares: Mapping[NodeId, float] = cached_shares
        self.alias = alias
        self.estimated_tokens = estimate_probable_tokens(spec.demand)
        """Expected tokens of prompt and answer, which count towards the fair share of the key."""
        self.answer: StreamedAnswer | CollectedAnswer = _create_answer(spec)
        self.tokens = GeneratedTokens(spec.params.n, self.params.max_tokens)
        self.tried: TriedNodes = TriedNodes()
        self.life = RequestLife(now)
        self.node: NodeId | None = None
        """Copy of `life.node`, which is read for every token; None without a current attempt."""
        self.streaming = False
        """Whether the current attempt has its first token. Derived from `life.state` and read for every token."""
        self.version = UNKNOWN_VERSION
        """Version of the model that generates the answer, or will generate it; unknown before the first attempt."""
        self.prompt_counts: tuple[int, int] = (0, 0)
        """Prompt tokens, and how many of them were cached, for usage; zeros until a node or upstream reports them."""
        self.entry: QueuedRequest[ActiveRequest] | None = None
        """Place in the queue; None if the request is not queued."""
        self.deadline: float | None = None
        """Time at which the wait in the queue ends, in monotonic seconds. A later wait keeps the deadline.

        None before the first wait, and after a node has admitted the request.
        """
        self.swap = ""
        """Description of the model swap that the request waits for, for the control plane; empty for none."""
        self.steps: list[tuple[float, str, str]] = []
        """Steps as (seconds after arrival, event, node)."""

    @property
    def state(self) -> RequestState:
        """State of the request."""
        return self.life.state

    @property
    def outcome(self) -> Outcome | None:
        """Outcome of the request; None before its end."""
        return self.life.outcome

    @property
    def node_name(self) -> str:
        """Name of the node of the current attempt, or of the last one; empty before the first."""
        return self.life.node_name

    @property
    def attempts(self) -> int:
        """Number of attempts, undelivered ones included."""
        return self.life.attempts

    @property
    def attempt(self) -> int:
        """Number of the current attempt; 0 if there is none."""
        return self.life.attempt

    def step(self, event: Event, now: float) -> tuple[Action, ...]:
        """Apply an event at `now` (monotonic seconds). Return the actions that the dispatcher must perform.

        Raise `IllegalEventError` if the event is illegal in this state, and `InvariantError` if only a bug can have
        caused the new state. After either error the request is unchanged.
        """
        life, actions = step(self.life, event, now)
        self.life = life
        self.node = life.node
        self.streaming = life.state is _STREAMING
        return actions

    def check(self) -> None:
        """Check that the state of the request is consistent.

        Raise `InvariantError` if two values of `life` contradict each other. Raise `AssertionError` if the place in the
        queue or the node does not match the state.
        """
        self.life.check()
        assert (self.entry is not None) == (self.state is RequestState.QUEUED), self  # noqa: S101  an invariant
        assert (self.node is not None) == (self.state in ON_NODE), self  # noqa: S101  an invariant

    def add_step(self, now: float, event: str, node: str = "") -> None:
        """Record a step at `now` (monotonic seconds) for the history of the request.

        `node` is the name of the node that the step concerns; empty if it concerns none. At `MAX_STEPS`, the step in
        the middle is removed.
        """
        if len(self.steps) >= MAX_STEPS:
            del self.steps[MAX_STEPS // 2]
        self.steps.append((now - self.arrived, event, node))

    def get_attempt_history(self) -> AttemptHistory:
        """Return the facts about earlier attempts that placement needs: excluded nodes, and the version to resume.

        Return `FIRST` for a request that was never sent and is not queued. The version is None if no node could resume
        the answer.
        """
        if not self.life.attempts and self.entry is None:  # a waiting request must not be excluded by its own hold
            return FIRST
        tried = self.tried
        version = self.version if self.resumable else None
        return AttemptHistory(tried.refused, tried.never, tried.lost, self.number, version)

    def remove_node(self, node: NodeId) -> None:
        """Remove all state of a node that is no longer a member."""
        self.tried.remove_node(node)
        self.cached_shares = {other: share for other, share in self.cached_shares.items() if other != node}
        for state in () if self.alias is None else self.alias.list_states():
            state.remove_node(node)

    def use_candidate(self, state: CandidateState) -> CandidateState:
        """Switch to the state of another candidate of the alias, or of its upstream. Return the former state."""
        former = CandidateState(self.spec, self.demand, self.tried, self.chain, self.cached_shares)
        self.spec, self.demand, self.tried = state.spec, state.demand, state.tried
        self.chain, self.cached_shares = state.chain, state.cached_shares
        return former

    # tokens

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the model in `version`; empty before the first attempt."""
        return self.version.fingerprint

    @property
    def resumable(self) -> bool:
        """Whether a node with the same version of the model could resume the answer."""
        return bool(self.version.fingerprint) and self.tokens.longest > 0

    def add_delta(self, delta: Delta) -> bool:
        """Store one delta from the node. Return True if the answer must be flushed after the last delta of its frame.

        After a delta of a choice that does not exist, a streamed answer can no longer be resumed, because its ids are
        discarded. A collected answer ignores such a delta.
        """
        try:  # without a call of `tokens`: this runs for every token
            self.tokens.ids[delta.choice] += delta.ids
        except IndexError:
            if self.spec.stream or delta.choice < self.spec.params.n:
                self.tokens.discard_ids(delta)
        return self.answer.add(delta)

    def prepare_resume(self) -> None:
        """Set `demand.known_tokens` to the received tokens of the longest choice, before the answer is resumed."""
        self.demand = replace(self.demand, known_tokens=self.tokens.longest)

    def restart(self) -> None:
        """Discard the answer, which then starts from its beginning. The client must have received nothing of it."""
        self.tokens.restart()
        self.answer.discard()
        self.demand = replace(self.demand, known_tokens=0)

    # facts from nodes

    def set_version(self, version: ModelVersion) -> None:
        """Record the version of the model that generates the answer."""
        self.version = version

    def set_prompt_tokens(self, tokens: int) -> None:
        """Set the exact number of prompt tokens."""
        self.demand = replace(self.demand, prompt_tokens=tokens)

    def record_prefill(self, prompt: int, cached: int) -> None:
        """Record the number of prompt tokens of an admitted attempt, and how many of them are cached.

        The deadline is cleared, so that a later wait gets a new one. For embeddings and scores, `prompt` is the sum
        over all texts, and `demand.prompt_tokens` does not change.
        """
        if self.spec.embed is None:
            self.set_prompt_tokens(prompt)
        self.prompt_counts = prompt, cached
        self.deadline = None

    # queue

    def enter_queue(self, entry: "QueuedRequest[ActiveRequest]") -> None:
        """Record the place in the queue and its deadline."""
        self.entry = entry
        self.deadline = entry.deadline

    def leave_queue(self) -> None:
        """Record that the request has left the queue. It then waits for no model swap and no pull."""
        self.entry = None
        self.set_swap("")
        self.answer.announce_wait("")

    def set_swap(self, swap: str) -> bool:
        """Set the model swap that the request waits for; empty for none. Return whether it has changed.

        If it has, the next keep-alive to the client says whether the request waits for a swap.
        """
        if swap == self.swap:
            return False
        self.swap = swap
        self.answer.announce_wait(SWAP if swap else "")
        return True

    def extend_deadline(self, deadline: float) -> None:
        """Move the deadline in the queue to `deadline` (monotonic seconds), unless it is later already.

        Do nothing if the request is not queued.
        """
        if self.entry is not None:
            self.deadline = self.entry.extend(deadline)


def _create_answer(spec: RequestSpec) -> StreamedAnswer | CollectedAnswer:
    """Return the empty answer of a request."""
    if spec.embed is not None:
        return VectorsAnswer(spec.embed.count)
    return StreamedAnswer() if spec.stream else CollectedAnswer(spec.params.n, spec.params.logprobs)
