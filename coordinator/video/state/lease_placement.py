"""Choice of the node that is asked for memory for the first queued job, or the reason why the job waits. Pure.

The coordinator only chooses the node, and the node alone decides about the grant. The first choice is a node where the
lease fits now, by `wire.capacity.arithmetic.judge`. The second choice is a node where the lease could fit after idle
models are unloaded; only the node knows these models. A node that refused is skipped for the time in its refusal, from
1 to 60 s.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum

from coordinator.video.state.job_table import JobTable
from coordinator.video.state.jobs import VideoJob
from coordinator.video.state.memory_model import VideoMemoryProfile, VideoProfileKey, get_profile_key, predict_profile
from router.placement.cluster_view import MAX_REPORT_AGE_SECONDS, ClusterView, NodeView
from wire.capacity.arithmetic import Fits, compute_headroom, compute_most_bytes, compute_occupied, judge
from wire.node_state import NodeState
from wire.units import show_size
from wire.video import VideoPackage

Profiles = Mapping[VideoProfileKey, VideoMemoryProfile]
"""Measured memory profiles by their key."""


class NodeReadiness(IntEnum):
    """Readiness of a node to grant the lease of a job. Higher is better."""

    NEVER = 0
    """The lease does not fit even on the idle node, or the job needs more memory than the lease has."""
    ABSENT = 1
    """The node takes no video jobs now.

    It is not ready, silent, cordoned, draining, without guard, without permission, or without Ray.
    """
    BUSY = 2
    """The node runs another video job."""
    PAUSED = 3
    """The node is not asked until its pause ends (`JobTable.pauses`), or until it answers a lease request."""
    TIGHT = 4
    """The lease does not fit now, but may fit after the node has unloaded idle models."""
    FITS = 5
    """The lease fits now."""


@dataclass(frozen=True, slots=True)
class LeaseCandidate:
    """Node (id and name) as a candidate for the lease of a job.

    `why` has the name of the node and the reason against it, which is empty if the lease fits. `headroom` is in bytes.
    """

    node: str
    name: str
    readiness: NodeReadiness
    why: str
    headroom: int = 0


@dataclass(frozen=True, slots=True)
class LeaseChoice:
    """Choice of the node (id) that is asked for the lease of a job."""

    job: VideoJob
    node: str


@dataclass(frozen=True, slots=True)
class NoLeaseChoice:
    """Result if no node can currently be asked for the lease of a job.

    `phase` is the reason as text for the client. `busy` is whether the best node could be asked if it ran no other
    video job.
    """

    job: VideoJob
    phase: str
    busy: bool


def get_profile(package: VideoPackage, profiles: Profiles) -> VideoMemoryProfile:
    """Return the memory profile of a package: the measured one, or else a prediction (`predict_profile`)."""
    return profiles.get(get_profile_key(package)) or predict_profile(package)


def find_packages(view: ClusterView, model: str, labels: Iterable[str] = ()) -> list[tuple[NodeView, VideoPackage]]:
    """Return the nodes that have all of these labels and the served package of `model`, each with that package.

    If there are different packages under one name, only one of them is served. A package on ready nodes is preferred,
    then the package on the most nodes, then the one with the smallest fingerprint.
    """
    offers = _list_offers(view, model, labels)
    ready = {package.fingerprint for node, package in offers if node.state == NodeState.READY}
    counts = Counter(package.fingerprint for _, package in offers)
    served = min(counts, key=lambda known: (known not in ready, -counts[known], known), default="")
    return [(node, package) for node, package in offers if package.fingerprint == served]


def _list_offers(view: ClusterView, model: str, labels: Iterable[str]) -> list[tuple[NodeView, VideoPackage]]:
    """Return the nodes with all of these labels and any usable package of `model`, with that package."""
    wanted = frozenset(labels)
    return [
        (node, package)
        for node in view.nodes
        if wanted <= node.labels
        for package in node.video.packages
        if package.name == model and not package.cause
    ]


def list_video_models(view: ClusterView) -> dict[str, VideoPackage]:
    """Return the served packages of all usable video models, by name.

    Packages with a `cause` are omitted. If there are different packages under one name, `find_packages` selects one.
    """
    names = dict.fromkeys(package.name for node in view.nodes for package in node.video.packages if not package.cause)
    return {name: find_packages(view, name)[0][1] for name in names}


def choose_node(
    table: JobTable, view: ClusterView, profiles: Profiles, now: float
) -> LeaseChoice | NoLeaseChoice | None:
    """Return the node to ask for the lease of the first queued job, or the reason why no node can be asked now.

    Return None if the queue is empty, or if a lease request is unanswered. `now` is in monotonic seconds, on the clock
    of `NodeView.reported_at`.
    """
    job = table.head
    if job is None:
        return None
    model, labels = job.wanted.model, job.wanted.labels
    packages = find_packages(view, model, labels)
    ratings = sorted(
        (rate_node(table, node, package, job, profiles, now) for node, package in packages),
        key=lambda rating: (-rating.readiness, -rating.headroom, rating.node),
    )
    best = ratings[0] if ratings else None
    if best is not None and best.readiness >= NodeReadiness.TIGHT:
        return LeaseChoice(job, best.node)
    served = {node.id for node, _ in packages}
    unused = [node.name for node, _ in _list_offers(view, model, labels) if node.id not in served]
    phase = _describe_wait(job, best, unused)
    return NoLeaseChoice(job, phase, best is not None and best.readiness == NodeReadiness.BUSY)


def rate_node(
    table: JobTable,
    node: NodeView,
    package: VideoPackage,
    job: VideoJob,
    profiles: Profiles,
    now: float,
) -> LeaseCandidate:
    """Return the rating of a node for the lease of a job.

    `now` is in monotonic seconds, on the clock of `NodeView.reported_at`.
    """
    memory, lease = node.memory, table.find_hold(node.id)
    free_bytes = compute_headroom(memory.ceiling, memory.margin, compute_occupied(memory), memory.reserved) or 0

    def build_candidate(readiness: NodeReadiness, why: str) -> LeaseCandidate:
        return LeaseCandidate(node.id, node.name, readiness, f"{node.name}: {why}", free_bytes)

    need = get_profile(package, profiles).compute_need(job.wanted.tokens)
    if need > job.size:
        return build_candidate(
            NodeReadiness.NEVER, f"its engine needs {show_size(need)} for this, the lease is {show_size(job.size)}"
        )
    if not could_fit_unloaded(node, job.size):
        return build_candidate(
            NodeReadiness.NEVER, f"its cap leaves {show_size(compute_most_bytes(memory))} for everything"
        )
    absent = _explain_absence(node, now)
    if absent:
        return build_candidate(NodeReadiness.ABSENT, absent)
    if lease is not None and lease.granted:
        return build_candidate(NodeReadiness.BUSY, "it makes another video")
    if lease is not None or table.pauses.get(node.id, 0.0) > now:  # it refused, or has not answered
        return build_candidate(NodeReadiness.PAUSED, job.phase)
    fits = judge(memory, job.size, node=node.name)
    if isinstance(fits, Fits):
        return build_candidate(NodeReadiness.FITS, "")
    return build_candidate(NodeReadiness.TIGHT, fits.message)


def could_fit_unloaded(node: NodeView, size: int) -> bool:
    """Return whether a lease of `size` bytes fits on the idle node without models. True for a node without a report."""
    return not node.memory.cap or size <= compute_most_bytes(node.memory)


def explain_denial(node: NodeView) -> str:
    """Return why a node has no permission for video jobs, with the remedy; empty if it has permission."""
    if node.video_allowed:
        return ""
    return f"it is not allowed to make videos: `cluster node allow-video {node.name}` allows it"


def _explain_absence(node: NodeView, at: float) -> str:
    """Return why a node with the package cannot take a job now; empty if it can.

    `at` is the time now on the clock of `NodeView.reported_at`.
    """
    if node.state == NodeState.PAUSED:
        return f"it is paused: {node.sharing.why}"
    if node.state != NodeState.READY or at - node.reported_at > MAX_REPORT_AGE_SECONDS:
        return f"it is {node.state if node.state != 'ready' else 'silent'}"
    if node.cordoned or node.draining:
        return "it is cordoned" if node.cordoned else "it is being drained"
    if not node.memory.guard:
        return "its memory.guard is off, and without it no memory is lent"
    if not node.video.ready:
        return node.video.cause or "it cannot make videos now"
    return explain_denial(node) or ("" if node.video.ray else node.video.ray_cause or "Ray is starting there")


def _describe_wait(job: VideoJob, best: LeaseCandidate | None, unused: list[str]) -> str:
    """Return why a job waits. `unused` are the names of the nodes that have another package under the job's model."""
    model = job.wanted.model
    if best is None:
        labels = f" and the labels {', '.join(job.wanted.labels)}" if job.wanted.labels else ""
        return f"waiting for a node that has {model}{labels}"
    if best.readiness == NodeReadiness.PAUSED:
        return job.phase
    others = f"; other files under the name {model} on {', '.join(unused[:3])} are not used" if unused else ""
    return f"waiting: {best.why}{others}"


def find_nearest_misfit(
    view: ClusterView, model: str, tokens: int, size: int, profiles: Profiles
) -> tuple[VideoPackage, str] | None:
    """Return the package with the smallest deficit, and the reasons of nodes, if a job would not fit on any idle node.

    Return None if the job fits on a node, or if no node has the model. `size` is the lease in bytes, `tokens` the
    number of spatial tokens of a frame (`memory_model`).
    """
    reasons: list[tuple[int, VideoPackage, str]] = []
    for node, package in find_packages(view, model):
        need = get_profile(package, profiles).compute_need(tokens)
        if need <= size and could_fit_unloaded(node, size):
            return None
        short = max(need - size, size - compute_most_bytes(node.memory))
        why = (
            f"its engine {package.engine or 'unknown'} needs {show_size(need)}"
            if need > size
            else f"its cap leaves {show_size(compute_most_bytes(node.memory))} for everything"
        )
        reasons.append((short, package, f"{node.name}: {why}"))
    reasons.sort(key=lambda reason: reason[0])
    return (reasons[0][1], "; ".join(why for *_, why in reasons[:5])) if reasons else None


def is_guard_off(nodes: Iterable[NodeView]) -> bool:
    """Return whether all of these nodes have `memory.guard` off, and therefore lease no memory. False without nodes."""
    candidates = list(nodes)
    return bool(candidates) and not any(node.memory.guard for node in candidates)
