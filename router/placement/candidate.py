"""Data classes of placement: demand of a request, arithmetic of one node, and result over all nodes."""

import math
from collections.abc import Collection, Iterable, Mapping

import msgspec

from wire.capacity.arithmetic import KV_GROWTH_TOKENS, compute_most_bytes, compute_occupied
from wire.identity import NodeId
from wire.models.kind import ModelKind
from wire.models.version import ModelVersion
from wire.refusals import MemoryNumbers, RefusalCode, Refused
from wire.report import Memory, Model

TOOLS, LOGPROBS, SAMPLING, GRAMMAR = "tools", "logprobs", "sampling", "grammar"
"""Optional features of a model that a request may need; used in `ResourceDemand.features` and `Model.features`."""


class ResourceDemand(msgspec.Struct, frozen=True, gc=False):  # made for every request and node
    """Resources and features that a request needs on a node."""

    model: str
    prompt_bytes: int = 0
    """Bytes of the prompt as text; 0 for a prompt of token ids. For embeddings and scores see `other_bytes`."""
    prompt_tokens: int | None = None
    """Exact number of prompt tokens; None until a node has counted them, and for embeddings and scores."""
    max_tokens: int | None = None
    """Maximum output tokens of each choice; None if the request sets no limit."""
    choices: int = 1
    """Number of answers to generate, each with a decode row."""
    features: frozenset[str] = frozenset()
    """Optional features that the model must have, such as `TOOLS`."""
    labels: frozenset[str] = frozenset()
    """Node labels that the API key requires."""
    node: str = ""
    """Id of the only node that may take the request; empty for any node."""
    kind: ModelKind = ModelKind.CHAT
    """Kind of the model that the request needs."""
    other_bytes: int = 0
    """Bytes of all texts but the longest, in a request for embeddings or scores; `prompt_bytes` is the longest.

    The longest text decides the memory that the request needs; all texts count for its time.
    """
    known_tokens: int = 0
    """Generated tokens of the longest choice that are already known, because the answer began on another node."""

    def estimate_prompt_tokens(self, model: Model) -> int:
        """Return the number of prompt tokens with a model.

        Without an exact number, estimate it from the bytes of the prompt, at most the context of the model.
        """
        if self.prompt_tokens is not None:
            return self.prompt_tokens
        estimate = math.ceil(self.prompt_bytes / model.bytes_per_token)
        return min(estimate, model.context) if model.context else estimate

    @property
    def text_bytes(self) -> int:
        """Bytes of the prompt, or of all texts in a request for embeddings or scores."""
        return self.prompt_bytes + self.other_bytes

    def estimate_output_tokens(self, model: Model, prompt_tokens: int) -> int:
        """Return the output tokens to reserve for each choice: the model's usual output, or `max_tokens` if less.

        If the context length is known, the result is at most the context left after `prompt_tokens`, but at least 1.
        For a resumed answer, the usual output counts as at least `KV_GROWTH_TOKENS` more than the known tokens.
        """
        usual, most, context = model.expected_output, self.max_tokens, model.context
        if self.known_tokens:
            usual = max(usual, self.known_tokens + KV_GROWTH_TOKENS)
        if most is not None and most < usual:
            usual = most
        return usual if usual <= context - prompt_tokens or not context else max(1, context - prompt_tokens)


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """Placement arithmetic of one node for one request, as `evaluate_node` computes it.

    A node that lacks the model, or that is excluded by id or label, has only the fields up to `code`.
    """

    node: NodeId
    name: str
    """Display name of the node."""
    state: str
    """State of the node, as in `NodeView.state`."""
    why: str = ""
    """Reason why the node is infeasible; empty if it is feasible."""
    code: RefusalCode | None = None
    """Refusal code of `why`; None if the node is feasible."""
    need: int = 0
    """Estimated bytes that the request adds to the node's memory, with the weights that the node must load for it."""
    headroom: int | None = None
    """Bytes of headroom minus `withheld`; None if the memory cannot be read. If `Memory.guard` is False, `need`."""
    withheld: int = 0
    """Bytes subtracted from the node's headroom.

    These are reservations that its report does not contain, and a correction after a refusal.
    """
    memory: Memory = Memory()
    """Memory reading in the node's report."""
    prompt_tokens: int = 0
    """Prompt tokens on this node, exact or estimated."""
    output_tokens: int = 0
    """Output tokens to reserve for each choice."""
    expected_ttft: float = 0.0
    """Expected seconds to the first token."""
    in_flight: int = 0
    """Number of this router's requests on the node."""
    model: Model | None = None
    """Requested model on this node; None if the node does not have it or is excluded by id or label."""
    weights: int = 0
    """Part of `need` for weights that the node must load, in bytes; 0 if its report counts them already."""
    cached_share: float = 0.0
    """Share of the prompt that is probably in the node's prefix cache, 0 to 1."""
    tokens_ahead: int = 0
    """Tokens of other requests that the node must still prefill."""
    prefill_tokens: int = 0
    """Tokens that the node must prefill for this request.

    They are the tokens of the prompt or the texts that are probably not cached, and the known tokens of a resumed
    answer.
    """
    expected_answer: float = 0.0
    """Expected seconds from the first token to the last."""
    delay: float = 0.0
    """Sum of the seconds by which this request delays the prompts of other requests on the node.

    The seconds for which running rows stall are added with the weight `weights.ROW_WEIGHT`.
    """

    @property
    def feasible(self) -> bool:
        """Whether the node can take the request now."""
        return not self.why

    @property
    def idle(self) -> bool:
        """Whether the node has the model loaded, no request of this router, and no queued tokens."""
        return self.model is not None and self.model.loaded and not self.in_flight and not self.tokens_ahead

    @property
    def most_bytes(self) -> int:
        """Maximum bytes of a request with its model on the node, if the node had no other requests and models."""
        return compute_most_bytes(self.memory)

    def build_memory_numbers(self) -> MemoryNumbers:
        """Return the memory arithmetic of the candidate in bytes, for `error.memory` of an HTTP body.

        `withheld` counts as reserved. Without a footprint, memory in use and predicted memory are None.
        """
        memory = self.memory
        now = compute_occupied(memory)
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
    """Result of a placement with a node: the chosen node, and the arithmetic of every node."""

    chosen: Candidate
    """Node that gets the request."""
    candidates: tuple[Candidate, ...]
    """All nodes of the view, with the reasons of infeasible ones."""


class NoPlacement(msgspec.Struct, frozen=True, gc=False):
    """Result of a placement without a node: the refusal, and the arithmetic of every node."""

    refused: Refused
    """Refusal for the client, if no later attempt succeeds."""
    candidates: tuple[Candidate, ...]
    """All nodes of the view, with the reasons of infeasible ones."""
    candidate: Candidate | None = None
    """Node to which the router may send the request nevertheless, without a reservation; None without such a node.

    Only this node can decide whether the request fits. In one case, no member could ever hold the request by the
    estimate, and this node counts it exactly. In the other case, the model is loaded nowhere, and this node may unload
    idle models for it.
    """


class AttemptHistory(msgspec.Struct, frozen=True, gc=False):
    """Earlier attempts of a request, which exclude nodes from the next attempt."""

    refused: Mapping[NodeId, float] = msgspec.field(default_factory=dict[NodeId, float])
    """Nodes that refused the request, with the arrival time (monotonic seconds) of their newest report at that time."""
    never: Mapping[NodeId, Refused] = msgspec.field(default_factory=dict[NodeId, Refused])
    """Nodes that refused the request permanently, with their refusals."""
    lost: Collection[NodeId] = ()
    """Nodes that were lost or stopped while they had the request, and are not ready again."""
    waiting: int = -1
    """Number of the queued request (`ActiveRequest.number`), whose own hold does not count against it; -1 for none."""
    version: ModelVersion | None = None
    """Only version of the model that may serve the request; None allows any.

    This is the version that began the answer or, for a name with several versions, the version that is served.
    """


FIRST = AttemptHistory()
"""History of a request without earlier attempts."""


class HeadroomCorrection(msgspec.Struct, frozen=True, gc=False):
    """Limit for the headroom of a node that has refused a request for which the router's view showed room."""

    reported_at: float
    """Arrival time of the corrected report in monotonic seconds. The next report ends the correction."""
    headroom: int
    """Maximum headroom of the node in bytes."""


def explain(candidates: Iterable[Candidate], chosen: NodeId | None) -> list[dict[str, object]]:
    """Return one dictionary for each candidate with its arithmetic, for `cluster place` and `cluster explain`.

    `chosen` is the id of the chosen node; None without one. Sizes are in bytes, times in seconds.
    """
    return [_to_row(candidate, candidate.node == chosen) for candidate in candidates]


def _to_row(candidate: Candidate, chosen: bool) -> dict[str, object]:
    numbers = candidate.build_memory_numbers()
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
        "known_share": round(candidate.cached_share, 3),
        "in_flight": candidate.in_flight,
    }
