"""Counters of the router, which the coordinator exports. They are plain numbers that one event loop changes.

Rules
- The name of a row is that of a model of a member, or the label of an upstream. Invented names, and models beyond
  `MAX_MODELS`, share the row `OTHER`. Codes that are not in `OUTCOMES` share the outcome `FAILED`. The tables are
  therefore bounded.
- Nothing is counted per token: gaps between tokens are observed once per decode step of a node, for all its streams.
"""

from collections.abc import Container
from dataclasses import dataclass, field

from wire.histogram import Histogram
from wire.identity import NodeId
from wire.refusals import FailureCode, RefusalCode
from wire.state_machine import IllegalEventCounts

TTFT_BOUNDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 90, 300)
"""Upper bounds in seconds of the buckets of the time to first token."""
ITL_BOUNDS = (0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.1, 0.2, 0.5, 1, 2.5)
"""Upper bounds in seconds of the buckets of the time between two tokens."""
E2E_BOUNDS = (0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 960)
"""Upper bounds in seconds of the buckets of the duration of a whole request."""
WAIT_BOUNDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60)
"""Upper bounds in seconds of the buckets of the time in the queue."""
PLACEMENT_BOUNDS = (0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.005, 0.02)
"""Upper bounds in seconds of the buckets of the duration of a placement decision."""
MAX_MODELS = 64
"""Maximum number of models with a row of their own."""
MAX_PACES = 4096
"""Maximum pairs of node and model whose last decode step is stored. A further pair removes all stored steps.

Each removed step loses one gap.
"""
MAX_KEY_MODELS = 1024
"""Maximum pairs of key and model whose tokens are counted. Tokens of further pairs are not counted."""
OTHER = "other"
"""Name of the row of all models without a row of their own."""
FAILED = "failed"
"""Outcome of a request that ended with a code that is not in `OUTCOMES`, such as an unknown code of a newer node."""
OUTCOMES = frozenset({"ok", FAILED, *RefusalCode, *FailureCode} - {FailureCode.COMMAND_TIMEOUT})
"""Outcomes of a request: `ok`, a code of `RefusalCode` or `FailureCode`, or `FAILED` for any other.

`COMMAND_TIMEOUT` is omitted, because only commands end with it.
"""


UPSTREAM_OUTCOMES = ("ok", "refused", "limited", "failed", "interrupted", "cancelled")
"""Outcomes of a request at an upstream.

`refused` is a 4xx answer about the request. `limited` is a 429 answer, or a pool with all its connections in use.
`failed` means no usable answer, and `interrupted` an incomplete stream. `cancelled` means that the client disconnected
or the coordinator stopped.
"""


class ModelCounts:
    """Totals of one model: ended requests by outcome (`outcomes`) and their tokens.

    The histograms in seconds are `ttft` (time to first token), `itl` (gap between tokens) and `e2e` (duration of a
    request).
    """

    __slots__ = ("cached_tokens", "completion_tokens", "e2e", "itl", "outcomes", "prompt_tokens", "ttft")

    def __init__(self) -> None:
        self.outcomes: dict[str, int] = {}
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0
        self.ttft = Histogram(TTFT_BOUNDS)
        self.itl = Histogram(ITL_BOUNDS)
        self.e2e = Histogram(E2E_BOUNDS)

    def add_tokens(self, prompt: int, cached: int, generated: int) -> None:
        """Add the numbers of prompt, cached and generated tokens of a request. A negative number counts as 0."""
        if prompt > 0:
            self.prompt_tokens += prompt
        if cached > 0:
            self.cached_tokens += cached
        if generated > 0:
            self.completion_tokens += generated


class NodeCounts:
    """Totals of one node: tokens, and times to first token in seconds, counted as its frames arrive.

    `first_tokens` counts requests with a first token. `prompt_tokens` is the sum of the tokens of their prompts,
    `first_token_seconds` the sum of their times to first token.
    """

    __slots__ = ("first_token_seconds", "first_tokens", "generated_tokens", "prompt_tokens")

    def __init__(self) -> None:
        self.prompt_tokens = self.generated_tokens = self.first_tokens = 0
        self.first_token_seconds = 0.0

    def count_generated(self, tokens: int) -> None:
        """Add `tokens` generated tokens."""
        self.generated_tokens += tokens

    def count_first_token(self, prompt: int, seconds: float) -> None:
        """Count a first token, `seconds` after the request arrived, of a request with `prompt` prompt tokens."""
        self.prompt_tokens += prompt
        self.first_tokens += 1
        self.first_token_seconds += seconds


@dataclass(slots=True)
class UpstreamCounts:
    """Totals of one upstream."""

    outcomes: dict[str, int] = field(default_factory=dict[str, int])
    """Ended requests by outcome, one of `UPSTREAM_OUTCOMES`."""
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def count(self, outcome: str, prompt: int, completion: int) -> None:
        """Count a request with its outcome, one of `UPSTREAM_OUTCOMES`, and its prompt and generated tokens."""
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        self.prompt_tokens += prompt
        self.completion_tokens += completion


@dataclass(slots=True)
class Counters:
    """Totals of the router since its start. A field that ends in `_seconds` is a sum; its count gives the mean."""

    requests: dict[str, int] = field(default_factory=dict[str, int])
    """Ended requests by outcome, one of `OUTCOMES`."""
    answers: dict[int, int] = field(default_factory=dict[int, int])
    """HTTP answers of the model routes by status. 499 counts clients that disconnected before an answer."""
    refusals: dict[str, int] = field(default_factory=dict[str, int])
    """Refusals by nodes, by code. Several nodes may refuse a request that is still answered."""
    attempts: int = 0
    """Attempts to send a request to a node, including those that found no link."""
    retries: int = 0
    """Attempts after the first attempt of a request."""
    nodes_lost: int = 0
    """Requests that were on a node when the node was lost."""
    resumes: int = 0
    """Attempts that resume an answer from its received tokens, including migrations."""
    moves: int = 0
    """Requests moved away from a node that drains or has fallen silent, or moved to an idle node."""
    swaps: dict[str, int] = field(default_factory=lambda: {"done": 0, "dropped": 0})
    """Ended model swaps by result: `done` or `dropped`."""
    illegal_events: IllegalEventCounts = field(default_factory=IllegalEventCounts)
    """Illegal events by state machine. Any number but 0 is a bug."""
    slow_clients: int = 0
    """Streams that were ended because their client did not read them."""
    queue_entries: int = 0
    """Number of times that a request was queued."""
    queue_seconds: float = 0.0
    """Total seconds of all waits in the queue."""
    prompt_tokens: int = 0
    """Prompt tokens of complete answers of nodes. This and the next two fields count no failures and no upstreams."""
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_tokens: int = 0
    """Number of requests with a first token from a node, which is the count of `first_token_seconds`."""
    first_token_seconds: float = 0.0
    durations: int = 0
    """Number of ended requests, which is the count of `duration_seconds`."""
    duration_seconds: float = 0.0
    upstreams: dict[str, UpstreamCounts] = field(default_factory=dict[str, UpstreamCounts])
    """Totals of each upstream that took a request."""
    models: dict[str, ModelCounts] = field(default_factory=dict[str, ModelCounts])
    """Totals of each model by name, and of `OTHER`."""
    placements: dict[NodeId, int] = field(default_factory=dict[NodeId, int])
    """Attempts on each member. A node that is no longer a member has no entry."""
    nodes: dict[NodeId, NodeCounts] = field(default_factory=dict[NodeId, NodeCounts])
    """Tokens and times to the first token of each member."""
    keys: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    """Prompt and generated tokens of ended requests by key id and model; at most `MAX_KEY_MODELS` pairs."""
    queue_wait: Histogram = field(default_factory=lambda: Histogram(WAIT_BOUNDS))
    """Waits in the queue, in seconds."""
    placement: Histogram = field(default_factory=lambda: Histogram(PLACEMENT_BOUNDS))
    """Durations of placement decisions, in seconds."""
    _last_steps: dict[tuple[NodeId, str], tuple[int, float]] = field(
        default_factory=dict[tuple[NodeId, str], tuple[int, float]]
    )

    def count_upstream(self, upstream: str, outcome: str, prompt: int, completion: int) -> None:
        """Count a request that the upstream `upstream` took, with its prompt and generated tokens.

        `outcome` is one of `UPSTREAM_OUTCOMES`.
        """
        self.upstreams.setdefault(upstream, UpstreamCounts()).count(outcome, prompt, completion)

    def get_model(self, name: str) -> ModelCounts:
        """Return the totals of a model, which later calls change. A new model begins with zeros.

        Return the totals of `OTHER` for an empty name, and for a new name once `MAX_MODELS` models have totals.
        """
        counts = self.models.get(name or OTHER)
        if counts is None:
            name = name if name and len(self.models) < MAX_MODELS else OTHER
            counts = self.models.setdefault(name, ModelCounts())
        return counts

    def get_node(self, node: NodeId) -> NodeCounts:
        """Return the totals of a node, which later calls change. A new node begins with zeros."""
        counts = self.nodes.get(node)
        if counts is None:
            counts = self.nodes[node] = NodeCounts()
        return counts

    def add_key_tokens(self, key: str, model: str, tokens: int) -> None:
        """Add the tokens of a request to the total of its key (an id) and model. A negative number counts as 0.

        A model without a row in `models`, such as an empty name, counts as `OTHER`. After `MAX_KEY_MODELS` pairs, the
        tokens of a new pair are not counted.
        """
        pair = key, model if model in self.models else OTHER
        counted = self.keys.get(pair)
        if counted is None and len(self.keys) >= MAX_KEY_MODELS:
            return
        self.keys[pair] = (counted or 0) + (tokens if tokens > 0 else 0)

    def retain_keys(self, known: Container[str]) -> None:
        """Remove the totals of API keys whose ids are not in `known`."""
        self.keys = {pair: tokens for pair, tokens in self.keys.items() if pair[0] in known}

    def count_end(self, outcome: str, model: str, seconds: float) -> ModelCounts:
        """Count an ended request, its outcome, and its duration in seconds. Return the totals of its model.

        An outcome that is not in `OUTCOMES` counts as `FAILED`.
        """
        outcome = outcome if outcome in OUTCOMES else FAILED
        self.requests[outcome] = self.requests.get(outcome, 0) + 1
        self.durations += 1
        self.duration_seconds += seconds
        counts = self.get_model(model)
        counts.outcomes[outcome] = counts.outcomes.get(outcome, 0) + 1
        counts.e2e.observe(seconds)
        return counts

    def count_attempt(self, node: NodeId, *, first: bool, resumed: bool) -> None:
        """Count an attempt to send a request to a node.

        `first` tells whether this is the first attempt of the request. `resumed` tells whether the attempt resumes the
        answer from its received tokens.
        """
        self.attempts += 1
        if not first:
            self.retries += 1
        if resumed:
            self.resumes += 1
        self.placements[node] = self.placements.get(node, 0) + 1

    def count_finished(self, prompt: int, cached: int, completion: int) -> None:
        """Add the numbers of prompt, cached and generated tokens of a complete answer."""
        self.prompt_tokens += prompt
        self.cached_tokens += cached
        self.completion_tokens += completion

    def count_generated(self, node: NodeId, tokens: int) -> None:
        """Add the number of tokens that a node has generated for requests that are on it. Called once per frame."""
        self.get_node(node).count_generated(tokens)

    def count_node_loss(self) -> None:
        """Count one request that was on a node when the node was lost."""
        self.nodes_lost += 1

    def count_move(self) -> None:
        """Count a request that was moved to another node."""
        self.moves += 1

    def count_slow_client(self) -> None:
        """Count a stream that was ended because its client did not read it."""
        self.slow_clients += 1

    def count_queue_entry(self) -> None:
        """Count a request that enters the queue."""
        self.queue_entries += 1

    def count_swap(self, *, done: bool) -> None:
        """Count a model swap that has ended. `done` tells whether the model was loaded; otherwise it was dropped."""
        self.swaps["done" if done else "dropped"] += 1

    def count_answer(self, status: int) -> None:
        """Count an HTTP answer by its status."""
        self.answers[status] = self.answers.get(status, 0) + 1

    def count_refusal(self, code: str) -> None:
        """Count a refusal by a node, by its code."""
        self.refusals[code] = self.refusals.get(code, 0) + 1

    def count_first_token(self, node: NodeId, model: str, prompt_tokens: int, seconds: float) -> None:
        """Count the first token that a node sent for a request, `seconds` after the request arrived."""
        self.first_tokens += 1
        self.first_token_seconds += seconds
        self.get_node(node).count_first_token(prompt_tokens, seconds)
        self.get_model(model).ttft.observe(seconds)

    def count_queue_exit(self, seconds: float) -> None:
        """Record that a request leaves the queue after a wait of `seconds`."""
        self.queue_seconds += seconds
        self.queue_wait.observe(seconds)

    def record_decode_step(self, node: NodeId, model: str, leader: int, streams: int, now: float) -> None:
        """Record a decode step of a node that extended `streams` streams of a model, at `now` in monotonic seconds.

        `leader` is the number of the first of these requests. If this request was also first in the last step, the time
        between the steps counts as one gap of every stream. Otherwise nothing is counted.
        """
        key = node, model
        last = self._last_steps.get(key)
        if last is None and len(self._last_steps) >= MAX_PACES:
            self._last_steps.clear()
        self._last_steps[key] = leader, now
        if last is not None and last[0] == leader:
            self.get_model(model).itl.observe(now - last[1], streams)

    def remove_node(self, node: NodeId) -> None:
        """Remove the totals and the last decode steps of a node that is no longer a member."""
        self.placements.pop(node, None)
        self.nodes.pop(node, None)
        for key in [key for key in self._last_steps if key[0] == node]:
            del self._last_steps[key]
