"""Placement decisions of the dispatcher over its newest view, with reservations, breakers and corrections."""

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from router.dispatch.active_request import ActiveRequest
from router.dispatch.circuit_breaker import CircuitBreakers
from router.dispatch.counters import Counters
from router.dispatch.decision_log import DecisionLog
from router.dispatch.request_events import CorrectHeadroom
from router.placement.candidate import (
    FIRST,
    AttemptHistory,
    Candidate,
    HeadroomCorrection,
    NoPlacement,
    Placement,
    ResourceDemand,
)
from router.placement.cluster_view import ClusterView, NodeView, replace_state
from router.placement.feasibility import find_unavailable_reason
from router.placement.model_demand import ModelDemand
from router.placement.model_load import LoadPlacement, choose_load_node
from router.placement.place import evaluate_node, place
from router.placement.policies import Policy
from router.placement.reservations import ReservationLedger
from wire.identity import NodeId
from wire.models.kind import get_kind
from wire.refusals import RefusalCode, Refused

FAILING = "failing"
"""State of a node in the view for placement while its breaker is open or waits for a probe."""


PullFinder = Callable[[str], Refused | None]
"""Function that returns the refusal for the name of a model that is being pulled; None for any other model."""


def _find_no_pull(model: str) -> Refused | None:
    """Return None, because no model is being pulled."""


class Placer:
    """Placement decisions. `clock` returns monotonic seconds, `draw` returns numbers in [0, 1) for ties."""

    def __init__(
        self,
        ledger: ReservationLedger,
        breakers: CircuitBreakers[NodeId],
        counters: Counters,
        history: DecisionLog,
        *,
        policy: Policy,
        clock: Callable[[], float],
        draw: Callable[[], float],
    ) -> None:
        self._ledger = ledger
        self._breakers = breakers
        self._counters = counters
        self._history = history
        self._policy = policy
        self._clock = clock
        self._draw = draw
        self.view = ClusterView()
        """Newest view of the cluster."""
        self._corrections: dict[NodeId, HeadroomCorrection] = {}
        self._demand = ModelDemand()
        self._find_pull: PullFinder = _find_no_pull

    # view

    def set_view(self, view: ClusterView) -> None:
        """Replace the view. A new report of a node ends the correction of its headroom."""
        self.view = view
        for node in view.nodes if self._corrections else ():
            correction = self._corrections.get(node.id)
            if correction is not None and correction.reported_at != node.reported_at:
                del self._corrections[node.id]

    def mark_failing_nodes(self, view: ClusterView, now: float) -> ClusterView:
        """Return the view for placement, in which the state of nodes that keep failing is `FAILING`.

        These are the nodes whose breaker is open or waits for a probe at `now` (monotonic seconds).
        """
        barred = self._breakers.list_barred_nodes(now)
        if not barred:
            return view
        return ClusterView(tuple(replace_state(node, FAILING) if node.id in barred else node for node in view.nodes))

    def get_report_time(self, node: NodeId) -> float:
        """Return the arrival of a node's newest report in monotonic seconds; -1 if the node is not a member."""
        node_view = self.view.find_node(node)
        return -1.0 if node_view is None else node_view.reported_at

    def correct_headroom(self, _: ActiveRequest, action: CorrectHeadroom) -> None:
        """Limit the headroom of a node that refused a request to the action's headroom, until its next report."""
        self._corrections[action.node] = HeadroomCorrection(self.get_report_time(action.node), action.headroom)

    def remove_node(self, node: NodeId) -> None:
        """Remove the headroom correction of a node that is lost or no longer a member."""
        self._corrections.pop(node, None)

    # pulls

    def watch_pulls(self, find_pull: PullFinder) -> None:
        """Set the function that finds the refusal for a model that is being pulled."""
        self._find_pull = find_pull

    def find_pull(self, model: str) -> Refused | None:
        """Return the refusal for a model that is being pulled and that no node has; None for any other model."""
        return None if self.view.has_model(model) else self._find_pull(model)

    # requests

    def record_request(self, model: str) -> None:
        """Add a new request for a model to the recent demand, which decides where idle models are unloaded."""
        self._demand.record_request(model, self._clock())

    def judge(self, request: ActiveRequest, view: ClusterView, demand: ResourceDemand) -> Placement | NoPlacement:
        """Return the placement of a request with the demand `demand` on the nodes of `view`.

        The duration is counted, but the decision is not recorded for later explanation.
        """
        now = self._clock()
        marked = self.mark_failing_nodes(view, now) if self._breakers.by_node else view
        trials = self._restrict_to_one_model(
            request.get_attempt_history(), demand.model, marked if view is self.view else None
        )
        result = place(
            marked,
            demand,
            self._ledger,
            now=now,
            draw=self._draw,
            policy=self._policy,
            corrections=self._corrections,
            trials=trials,
            cached_shares=request.cached_shares,
            demand=self._demand,
        )
        self._counters.placement.observe(self._clock() - now)
        return result

    def decide(self, request: ActiveRequest) -> Placement | NoPlacement:
        """Return the placement of a request on all nodes, and record it for later explanation.

        A request for a model that is being pulled gets a refusal that is not final.
        """
        result = self.judge(request, self.view, request.demand)
        if not isinstance(result, Placement) and result.refused.code is RefusalCode.NO_MODEL:
            result = replace(result, refused=self.find_pull(request.demand.model) or result.refused)
        return self.record(request, result)

    def record(self, request: ActiveRequest, result: Placement | NoPlacement) -> Placement | NoPlacement:
        """Record a decision for later explanation, and return it.

        At most `decision_log.MAX_CANDIDATES_KEPT` candidates are stored.
        """
        spec, nodes = request.spec, len(self.view.nodes)
        self._history.record_decision(self._clock(), spec.request_id, spec.key, request.demand, result, nodes)
        return result

    def judge_on_node(self, request: ActiveRequest, node: NodeView) -> Candidate:
        """Return one node as a candidate for a request. Earlier attempts of the request may exclude the node."""
        trials = self._restrict_to_one_model(request.get_attempt_history(), request.demand.model)
        return evaluate_node(
            node, request.demand, self._ledger, self._clock(), self._corrections, trials, request.cached_shares
        )

    def judge_as_new(self, request: ActiveRequest, node: NodeView) -> Candidate:
        """Return one node as a candidate for a request, as if the request had no earlier attempts."""
        return evaluate_node(
            node, request.demand, self._ledger, self._clock(), self._corrections, FIRST, request.cached_shares
        )

    def _restrict_to_one_model(
        self, trials: AttemptHistory, name: str, marked: ClusterView | None = None
    ) -> AttemptHistory:
        """Return the history with one version, if the nodes have several versions of the model `name`.

        The version is that of the begun answer, or the served version of the nodes that the request has not lost.
        `marked` is the result of `mark_failing_nodes` for all nodes; None computes it.
        """
        if trials.version is not None:
            return trials
        view = marked or self.mark_failing_nodes(self.view, self._clock())
        if trials.lost:
            view = ClusterView(tuple(node for node in view.nodes if node.id not in trials.lost))
        identity = view.identify(name)
        return replace(trials, version=identity.version) if identity.has_conflict else trials

    # questions without a request

    def preview(self, demand: ResourceDemand) -> Placement | NoPlacement:
        """Return where a request with this demand would be placed now. Nothing is sent, reserved or recorded.

        A model with several versions is placed in its served version only.
        """
        now = self._clock()
        return place(
            self.mark_failing_nodes(self.view, now),
            demand,
            self._ledger,
            now=now,
            draw=self._draw,
            policy=self._policy,
            corrections=self._corrections,
            trials=self._restrict_to_one_model(FIRST, demand.model),
            demand=self._demand,
        )

    def choose_load_node(self, model: str, tried: Mapping[NodeId, Refused]) -> LoadPlacement | Refused:
        """Return the node that should load a model, or the refusal if there is none. Nothing is reserved.

        `tried` maps the nodes that have refused the load to their refusals. These nodes are excluded. Only the served
        version of the model is loaded. `LoadPlacement.loaded` tells whether the node has the model loaded already.
        """
        now = self._clock()
        return choose_load_node(
            self.mark_failing_nodes(self.view, now),
            model,
            self._ledger,
            now=now,
            draw=self._draw,
            policy=self._policy,
            corrections=self._corrections,
            tried=tried,
            version=self._restrict_to_one_model(FIRST, model).version,
        )

    def find_unavailable_refusal(self, node: NodeView) -> Refused | None:
        """Return the refusal of a node that takes no request now; None if the node takes requests.

        The reason is its state, a cordon or drain, a late report, or its engine. The refusal suggests a retry after
        2 s.
        """
        why, code = find_unavailable_reason(node, self._clock())
        return None if code is None else Refused(code, f"{node.name} {why}", None, 2.0, node.name)

    def find_outage_reason(self) -> str:
        """Return why no model of the cluster could take a short request now; empty if at least one could.

        The reason is that of the last model. Without models, the reason is that no node has reported a model.
        """
        refused = "no node has reported a model"
        for name, model in self.view.get_models().items():
            result = self.preview(ResourceDemand(name, prompt_bytes=64, kind=get_kind(model.features)))
            if isinstance(result, Placement):
                return ""
            refused = result.refused.message
        return refused
