"""Place a request on a node: filter, score and pick over one immutable view.

Theory. `need` is the memory that the request adds on a node (`wire.capacity.model_needs.ModelNeeds`), a sum:

- The KV of the prompt and of the expected output for every choice.
- The largest transient of a prefill chunk or a decode step.
- The weights of a model that is not loaded.

For a long text, `need` is at least the memory of its tokenization, minus the weights of a load in progress. A node is
feasible if it meets all of these conditions:

- The request and its API key allow the node.
- The node is ready, not cordoned, not draining and has a fresh report, and its engine runs.
- The node serves the model, in the version, kind and features that the request needs, with a sufficient context.
- No earlier attempt of the request excludes the node (`feasibility`).
- No model swap bars a new request for the model.
- `wire.capacity.arithmetic.judge`, the arithmetic of the node's own gate, accepts `need` in addition to the bytes
  reserved there since the report.

No policy can override that filter: a policy only orders the feasible nodes (`policies`) by the times of `cost_model`.

A model that is not loaded costs its weights and its load time. While a node loads the weights, its report already
counts them. A node that cannot load a model is treated like a node without that model. If no node can load it, the
request ends with the cause instead of waiting (`refusals`).

The balanced order compares in turn:

1. Room for two or more requests of this size (full marks) before room for one.
2. The shortest time.
3. The fewest requests in flight relative to the decode speed.
4. The largest share of the prompt in the prefix cache (`prefix_affinity`), which also shortens the time.
5. The largest share of headroom.
6. Chance.

A node on which the request fits gets full marks if it is idle with the model loaded, or has cached `PREFIX_HIT_SHARE`
of the prompt. Otherwise an idle node would lose to a node with more room that has to load the model. An order by plain
bytes would send all requests to the largest machine (simulated: median wait 6.4 s instead of 3.1 s at 40 % load).

Before a node has counted the prompt, the number of tokens is an estimate. It is the bytes of text divided by the
model's measured ratio, at most the model's context.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from router.placement.candidate import (
    FIRST,
    AttemptHistory,
    Candidate,
    HeadroomCorrection,
    NoPlacement,
    Placement,
    ResourceDemand,
)
from router.placement.cluster_view import ClusterView, NodeView
from router.placement.cost_model import estimate_times
from router.placement.feasibility import find_infeasible_reason
from router.placement.model_demand import NO_DEMAND, ModelDemand
from router.placement.policies import POLICIES, Policy
from router.placement.prefix_affinity import NOWHERE
from router.placement.refusals import build_refusal
from router.placement.reservations import ReservationLedger
from wire.capacity.arithmetic import (
    MAX_UNCHECKED_TEXT_BYTES,
    Fits,
    compute_headroom,
    compute_occupied,
    estimate_tokenize_bytes,
    judge,
)
from wire.identity import NodeId
from wire.refusals import RefusalCode
from wire.report import Model


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
    cached_shares: Mapping[NodeId, float] = NOWHERE,
    demand: ModelDemand = NO_DEMAND,
) -> Placement | NoPlacement:
    """Choose a node for a request, or return the refusal with the reason. Nothing is reserved.

    `ledger` has the reservations on the nodes. `now` is in monotonic seconds of the clock of `reported_at`. `draw()`
    returns random numbers in [0, 1) for ties. `corrections` limit the headroom of nodes that have just refused.
    `trials` are the earlier attempts of the request. `cached_shares` maps nodes to the share of the prompt in their
    prefix cache. `demand` is the recent demand for models, which decides where an idle model is unloaded.
    """
    candidates = tuple(
        [evaluate_node(node, request, ledger, now, corrections, trials, cached_shares) for node in view.nodes]
    )
    feasible = [candidate for candidate in candidates if not candidate.why]
    if not feasible:
        return build_refusal(view, request, candidates, trials, demand.compute_rates(now))
    if len(feasible) == 1:
        return Placement(feasible[0], candidates)
    ranks = [(*policy.score(candidate, request), draw()) for candidate in feasible]
    return Placement(feasible[ranks.index(min(ranks))], candidates)


def evaluate_node(
    node: NodeView,
    request: ResourceDemand,
    ledger: ReservationLedger,
    now: float,
    corrections: Mapping[NodeId, HeadroomCorrection],
    trials: AttemptHistory,
    cached_shares: Mapping[NodeId, float],
) -> Candidate:
    """Compute the placement arithmetic of one node for a request, with the reason if the node is infeasible.

    The arguments have the meanings of those of `place`.
    """
    if request.node and request.node != node.id:
        return _build_excluded(node, "is not the node that the request names", RefusalCode.NOT_ALLOWED)
    if request.labels and not request.labels <= node.labels:
        missing_labels = ", ".join(sorted(request.labels - node.labels))
        return _build_excluded(node, f"has no label {missing_labels}", RefusalCode.NOT_ALLOWED)
    served = node.get_served_model(request.model)
    if served is None:
        return _build_excluded(node, f"does not serve {request.model}", RefusalCode.NO_MODEL)
    model, weights, choices = served.model, served.weights, request.choices
    tokens = request.estimate_prompt_tokens(model)
    output = request.estimate_output_tokens(model, tokens)
    need = served.needs.estimate(tokens, output, choices) + weights
    text_bytes = request.prompt_bytes + request.other_bytes
    if text_bytes > MAX_UNCHECKED_TEXT_BYTES:
        counted = 0 if model.loaded else model.weights - weights  # in the report already
        need = max(need + counted, estimate_tokenize_bytes(text_bytes, context=model.context)) - counted
    account = ledger.get_account(node.id)
    withheld = account.need + (ledger.sum_holds(node.id, trials.waiting) if ledger.holds else 0)
    if corrections and node.id in corrections:
        withheld += _compute_overstated_bytes(node, ledger, corrections[node.id])
    why, code = find_infeasible_reason(node, served, request, now, trials)
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
    if ledger.turns and not why and not request.known_tokens:
        why, code = _find_barring_turn(node, model, ledger)
    cached_share = cached_shares.get(node.id, 0.0) if cached_shares and model.loaded else 0.0
    prefill_tokens = (round(tokens * (1.0 - cached_share)) if cached_share else tokens) + request.known_tokens
    if request.other_bytes:
        prefill_tokens += round(request.other_bytes / model.bytes_per_token)
    engine = node.engine
    tokens_ahead = engine.queued_tokens + account.tokens
    ttft, answer, delay = estimate_times(served, engine, account, tokens_ahead, prefill_tokens, output, choices)
    return Candidate(  # by position: with names it takes ten times as long
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
        cached_share,
        tokens_ahead,
        prefill_tokens,
        answer,
        delay,
    )


def _find_barring_turn(node: NodeView, model: Model, ledger: ReservationLedger) -> tuple[str, RefusalCode | None]:
    """Return the reason and code of a model swap that bars new requests for a model on a node.

    Return an empty text and None if no swap bars them.
    """
    turn = ledger.turns.get(node.id)
    if turn is None or not turn.is_barred(model.name, model.loaded):
        return "", None
    why = f"makes room for {turn.model}: it takes no new requests for {model.name} until {turn.model} is loaded"
    return why, RefusalCode.NO_ROOM


def _build_excluded(node: NodeView, why: str, code: RefusalCode) -> Candidate:
    return Candidate(node=node.id, name=node.name, state=node.state, why=why, code=code)


def _compute_overstated_bytes(node: NodeView, ledger: ReservationLedger, correction: HeadroomCorrection) -> int:
    """Return the bytes by which the view still overstates the headroom of a node that has just refused."""
    if correction.reported_at != node.reported_at:
        return 0
    memory = node.memory
    now = compute_occupied(memory)
    free_bytes = compute_headroom(
        memory.ceiling, memory.margin, now, memory.reserved + ledger.get_unacknowledged_bytes(node.id)
    )
    return 0 if free_bytes is None else max(0, free_bytes - correction.headroom)
