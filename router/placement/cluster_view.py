"""Immutable view of the cluster for placement. Each report and each change of a member creates a new view.

`sanitize_report.build_node_view` builds the view of a node from its report.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from router.placement.weights import MIN_LOAD_LEFT_SHARE, UNKNOWN_LOAD_LEFT_SHARE
from wire.capacity.arithmetic import compute_headroom, compute_occupied
from wire.capacity.model_needs import ModelNeeds
from wire.enforcer_report import Enforcement
from wire.identity import NodeId
from wire.machine import Disk, SystemMemory
from wire.models.kind import get_kind
from wire.models.version import UNKNOWN_VERSION, ModelVersion
from wire.node_state import NodeState
from wire.report import (
    EngineState,
    Memory,
    Model,
    Sharing,
)
from wire.video import VideoState

MAX_REPORT_AGE_SECONDS = 3.0
"""Maximum age, in seconds, of a node's newest report for placement: three heartbeats of an idle node."""
MAX_NAME_PREFIXES = 3
"""Maximum number of provider parts that are removed from a model's name. `openrouter/qwen/MODEL` has two."""


class ServedModel:
    """Model of a node, with the values for placement that depend only on the node's report.

    `is_loading` is `NodeView.is_loading` of the model.
    """

    __slots__ = ("kind", "load_seconds", "model", "needs", "weights")

    def __init__(self, model: Model, *, is_loading: bool) -> None:
        self.model = model
        self.kind = get_kind(model.features)
        self.needs = ModelNeeds(model)
        self.weights = 0 if model.loaded or is_loading else model.weights
        """Bytes of weights that the node must load for a request; 0 if the report counts them already."""
        self.load_seconds = _estimate_load_seconds(model)
        """Expected seconds until the model is loaded; 0 for a loaded model."""


def _estimate_load_seconds(model: Model) -> float:
    if model.loaded:
        return 0.0
    loaded_share = model.progress or UNKNOWN_LOAD_LEFT_SHARE
    return model.load_seconds * (max(MIN_LOAD_LEFT_SHARE, 1.0 - loaded_share) if model.loading else 1.0)


@dataclass(frozen=True)
class NodeView:
    """State of one listed node for placement: its membership, and its newest report without impossible values.

    `wire.frames.Report` describes the fields that have the name of a report's field.
    """

    id: NodeId
    name: str
    state: str
    """A `NodeState`, or `router.dispatch.parts.placer.FAILING`.

    The latter means that requests must not use the node's engine, because its circuit breaker is open or a probe runs.
    """
    cordoned: bool = False
    """Whether an administrator excludes the node from new requests."""
    reported_at: float = 0.0
    """Time at which the newest report arrived, in monotonic seconds."""
    epoch: int = 0
    """Number of the node's link; each new link has another number."""
    memory: Memory = field(default_factory=Memory)
    engine: EngineState = field(default_factory=EngineState)
    models: Mapping[str, Model] = field(default_factory=dict[str, Model])
    """Models in the node's catalogue, by name."""
    acked_seq: int = 0
    """Highest sequence number of a request that the engine has admitted, queued or refused."""
    draining: bool = False
    system: SystemMemory = field(default_factory=SystemMemory)
    enforcement: Enforcement = field(default_factory=Enforcement)
    labels: frozenset[str] = frozenset()
    video: VideoState = field(default_factory=VideoState)
    video_allowed: bool = False
    """Whether an administrator allows the node to generate videos."""
    sharing: Sharing = field(default_factory=Sharing)
    illegal_events: int = 0
    """Events that the state machines of the agent refused since its start."""
    disk: Disk = field(default_factory=Disk)
    frames: frozenset[int] = frozenset()
    """Tags of the frames that the node knows (`Hello.frames`); empty for a node of version 0.1.0."""
    awaited: bool = False
    """Whether the first report with models is expected soon, because the coordinator has just started."""
    _served: dict[str, ServedModel] = field(
        default_factory=dict[str, ServedModel], init=False, repr=False, compare=False
    )

    def get_served_model(self, name: str) -> ServedModel | None:
        """Return the model of this name with its values for placement, which are cached; None for an unknown name."""
        served = self._served.get(name)
        if served is None:
            model = self.models.get(name)
            if model is None:
                return None
            served = self._served[name] = ServedModel(model, is_loading=self.is_loading(model))
        return served

    @cached_property
    def headroom(self) -> int | None:
        """Headroom of the node in bytes according to its report; None if its memory cannot be read."""
        memory = self.memory
        return compute_headroom(memory.ceiling, memory.margin, compute_occupied(memory), memory.reserved)

    @cached_property
    def takes_requests(self) -> bool:
        """Whether the node accepts new requests, by its state and its report. The age of the report is not checked."""
        state, engine = self.state, self.engine.state
        return state == NodeState.READY and not self.cordoned and not self.draining and engine == "ready"

    @property
    def engine_instance(self) -> int:
        """Identifier of the engine process, which changes when the engine restarts or the node gets a new link."""
        return hash((self.epoch, self.engine.restarts, self.engine.recycles))

    def is_loading(self, model: Model) -> bool:
        """Return whether the node is loading `model` and its report already counts the weights.

        Return False if several models are loading, because loads run one at a time and the report does not show which
        load runs.
        """
        return model.loading and not any(other.loading and other.name != model.name for other in self.models.values())


@dataclass(frozen=True)
class ModelIdentity:
    """Versions of a model that members have under one name."""

    version: ModelVersion = UNKNOWN_VERSION
    """Version that serves new requests; `UNKNOWN_VERSION` if no member can load the model."""
    holders: Mapping[ModelVersion, int] = field(default_factory=dict[ModelVersion, int])
    """Number of members that can load each version.

    A member that has not hashed its files is counted for the most frequent hashed version with the same fingerprint.
    """

    @cached_property
    def has_conflict(self) -> bool:
        """Whether members that can load a model of this name have different versions of it."""
        return len(self.holders) > 1


@dataclass(frozen=True, slots=True)
class ClusterView:
    """Immutable view of all listed nodes.

    Sleeping and lost nodes are included, because a request that only they could hold is not refused for good. A node
    that has left is included until it is deleted.
    """

    nodes: tuple[NodeView, ...] = ()
    _identities: dict[str, ModelIdentity] = field(
        default_factory=dict[str, ModelIdentity], init=False, repr=False, compare=False
    )

    def identify(self, name: str) -> ModelIdentity:
        """Return the version that serves a name, and the number of members with each version.

        Of several versions, those that a member can serve now have priority, then those with a fingerprint. Of these,
        the version on most members is served; on a tie, the lexicographically smallest. Sleeping members count; members
        that have left or cannot load the model do not (docs/decisions/0020-one-name-one-model.md).
        """
        identity = self._identities.get(name)
        if identity is None:
            identity = self._identities[name] = _compute_identity(self.nodes, name)
        return identity

    def has_model(self, name: str) -> bool:
        """Return whether a listed node has a model of exactly this name, even a model that it cannot load."""
        for node in self.nodes:  # noqa: SIM110  runs for every request, and a generator takes twice the time
            if name in node.models:
                return True
        return False

    def resolve_name(self, name: str) -> str:
        """Return the model's own name for the name in a request.

        An exact match has priority, then a match that ignores case, then a match that also ignores provider parts
        (`openai/`). An unknown name is returned unchanged.
        """
        if self.has_model(name):
            return name
        folded = {known.casefold(): known for known in sorted(self.get_models(), reverse=True)}
        parts = name.casefold().split("/", MAX_NAME_PREFIXES)
        tails = ("/".join(parts[at:]) for at in range(len(parts)))
        return next((folded[tail] for tail in tails if tail in folded), name)

    @property
    def conflicts(self) -> list[str]:
        """Names of all served models with different versions on different members, sorted."""
        return sorted(name for name in self.get_served_models() if self.identify(name).has_conflict)

    def get_models(self) -> dict[str, Model]:
        """Return all models of the listed nodes by name. Of several versions, the served one is preferred."""
        return self._select_models(lambda _: True)

    def get_served_models(self) -> dict[str, Model]:
        """Return the models that a listed node has loaded or can load, by name.

        Of several versions, the served one is preferred.
        """
        return self._select_models(lambda model: not model.cause)

    def get_loaded_models(self) -> dict[str, Model]:
        """Return the models that a listed node has loaded, by name.

        Of several versions, the served one is preferred.
        """
        return self._select_models(lambda model: model.loaded)

    def _select_models(self, is_selected: Callable[[Model], bool]) -> dict[str, Model]:
        models: dict[str, Model] = {}
        for node in self.nodes:
            for name, model in node.models.items():
                if is_selected(model) and (name not in models or model.version.is_same(self.identify(name).version)):
                    models[name] = model
        return models

    def find_node(self, node_id: NodeId) -> NodeView | None:
        """Return the view of the node with this id; None if the node is not listed."""
        return next((node for node in self.nodes if node.id == node_id), None)


def _compute_identity(nodes: tuple[NodeView, ...], name: str) -> ModelIdentity:
    versions = _list_versions(nodes, name)
    counted = Counter(version for version, _ in versions)
    if len(counted) == 1:
        return ModelIdentity(versions[0][0], counted)
    hashed: dict[str, ModelVersion] = {}
    for version in sorted(counted, key=lambda candidate: (counted[candidate], candidate)):
        if version.content:
            hashed[version.fingerprint] = version
    holders: Counter[ModelVersion] = Counter()
    able: set[ModelVersion] = set()
    for version, serves in versions:
        known = version if version.content else hashed.get(version.fingerprint, version)
        holders[known] += 1
        if serves:
            able.add(known)
    chosen = min(
        able or holders,
        key=lambda candidate: (not candidate.fingerprint, -holders[candidate], candidate),
        default=UNKNOWN_VERSION,
    )
    return ModelIdentity(chosen, holders)


def _list_versions(nodes: tuple[NodeView, ...], name: str) -> list[tuple[ModelVersion, bool]]:
    """Return the version of a model on each member that can load it, and whether the member can serve it now."""
    pairs = ((node, node.models.get(name)) for node in nodes if node.state != NodeState.LEFT)
    return [(model.version, _can_serve(node)) for node, model in pairs if model is not None and not model.cause]


def _can_serve(node: NodeView) -> bool:
    """Return whether a node takes new requests, now or after an interruption of a few seconds."""
    return node.state in (NodeState.READY, NodeState.SUSPECT) and not (
        node.cordoned or node.draining or node.engine.state == "failed"
    )


def replace_state(node: NodeView, state: str) -> NodeView:
    """Return a copy of a node's view with another state."""
    return dataclasses.replace(node, state=state)
