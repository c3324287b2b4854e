"""Metric families of the members and their links, and of the wishes for models."""

from collections.abc import Callable, Iterable, Mapping

from coordinator.metrics.families import (
    MAX_MODELS_PER_NODE,
    MetricFamily,
    MetricKind,
    Row,
    create_counter,
    create_gauge,
)
from coordinator.metrics.pool_readers import NODE_LABEL, read_by_node
from coordinator.metrics.pool_snapshot import PoolSnapshot
from coordinator.models.wish_counters import ActionOutcome, WishCounters
from wire.identity import NodeId
from wire.node_state import SERVING, NodeState

_G, _C, _H = MetricKind.GAUGE, MetricKind.COUNTER, MetricKind.HISTOGRAM


def _compute_headrooms(snapshot: PoolSnapshot) -> Mapping[NodeId, float]:
    return {
        node.id: node.memory.headroom + node.memory.reusable - snapshot.unacknowledged.get(node.id, 0)
        for node in snapshot.members
        if node.state in SERVING and node.memory.headroom is not None
    }


MEMBERS: tuple[MetricFamily[PoolSnapshot], ...] = (
    MetricFamily(
        "cluster_nodes",
        _G,
        "Members by state.",
        lambda p: [((state.value,), p.states.get(state.value, 0)) for state in NodeState],
        (("state", ", ".join(f"`{state.value}`" for state in NodeState)),),
    ),
    MetricFamily(
        "cluster_node_state",
        _G,
        "The state of a member; always 1.",
        lambda p: [((node.name, str(node.state)), 1.0) for node in p.members],
        (*NODE_LABEL, ("state", "as above, without `left`")),
    ),
    MetricFamily(
        "cluster_node_cordoned",
        _G,
        "1 while a member is cordoned by an administrator.",
        lambda p: [((node.name,), float(node.cordoned)) for node in p.members],
        NODE_LABEL,
    ),
    MetricFamily(
        "cluster_node_paused",
        _G,
        "1 while a member is paused for its owner.",
        lambda p: [((node.name,), float(node.sharing.paused)) for node in p.members],
        NODE_LABEL,
    ),
    MetricFamily(
        "cluster_node_paused_until_timestamp_seconds",
        _G,
        "End of a member's pause, Unix time.",
        lambda p: [
            ((node.name,), node.sharing.until) for node in p.members if node.sharing.paused and node.sharing.until
        ],
        NODE_LABEL,
        "while the pause has an end",
    ),
    MetricFamily(
        "cluster_node_report_timestamp_seconds",
        _G,
        "Arrival of a member's newest report, Unix time.",
        lambda p: [((node.name,), p.wall - (p.now - node.reported_at)) for node in p.members if node.reported_at],
        NODE_LABEL,
        "after the first report",
    ),
    MetricFamily(
        "cluster_node_headroom_bytes",
        _G,
        "Headroom used by placement: headroom and reusable memory of the newest report, minus later reservations.",
        read_by_node(_compute_headrooms),
        NODE_LABEL,
        "while the node is linked, not paused, and its footprint readable",
    ),
    MetricFamily(
        "cluster_node_certificate_issued_timestamp_seconds",
        _G,
        "Start of validity of a node's certificate, Unix time.",
        read_by_node(lambda p: {node: life[0] for node, life in p.node_certificates.items()}),
        NODE_LABEL,
        "while the node is linked",
    ),
    MetricFamily(
        "cluster_node_certificate_expires_timestamp_seconds",
        _G,
        "Expiry of a node's certificate, Unix time.",
        read_by_node(lambda p: {node: life[1] for node, life in p.node_certificates.items()}),
        NODE_LABEL,
        "while the node is linked",
    ),
    MetricFamily(
        "cluster_model_fingerprints",
        _G,
        "Different fingerprints of models with the same name.",
        lambda p: [
            ((name,), float(len(p.view.identify(name).holders))) for name in p.view.conflicts[:MAX_MODELS_PER_NODE]
        ],
        (("model", "a model that some member has"),),
        "while they differ",
    ),
    create_gauge(
        "coordinator_self_suspect",
        "1 while half of the members are silent since the same moment.",
        lambda p: p.self_suspect,
    ),
    create_gauge(
        "coordinator_unwritten_changes",
        "Changes of the coordinator's state that its disk does not take; they are in memory and tried again.",
        lambda p: p.unwritten,
    ),
    create_gauge("cluster_links", "Open links of nodes.", lambda p: p.links.open),
    create_gauge(
        "cluster_unauthenticated_connections",
        "Open connections to the cluster port that are neither links nor relays, such as those of joining nodes and of "
        "queries.",
        lambda p: p.links.unlinked,
    ),
    create_counter("cluster_node_connections", "Links established.", lambda p: p.links.linked),
    create_counter(
        "cluster_node_connections_denied",
        "Requests of nodes for a link that were refused.",
        lambda p: p.links.denied,
    ),
)

_WISHED_MODEL = (("model", "a model with a wish"),)
_OUTCOME = ("outcome", ", ".join(f"`{outcome}`" for outcome in ActionOutcome))


def _read_replicas(at: int) -> Callable[[PoolSnapshot], Iterable[Row]]:
    return lambda picture: [((model,), counts[at]) for model, counts in picture.wishes.replicas.items()]


def _read_actions(
    read: Callable[[WishCounters], dict[tuple[str, ActionOutcome], int]],
) -> Callable[[PoolSnapshot], Iterable[Row]]:
    return lambda picture: [
        ((model, outcome.value), count) for (model, outcome), count in read(picture.wishes.counters).items()
    ]


WISHES: tuple[MetricFamily[PoolSnapshot], ...] = (
    MetricFamily(
        "wish_replicas_wanted",
        _G,
        "Replicas of a model that are wanted now; 0 while the model rests without requests.",
        _read_replicas(0),
        _WISHED_MODEL,
        "while a wish for the model exists",
    ),
    MetricFamily(
        "wish_replicas_ready",
        _G,
        "Replicas of a model on nodes that its wish allows, and that take requests.",
        _read_replicas(1),
        _WISHED_MODEL,
        "while a wish for the model exists",
    ),
    MetricFamily(
        "wish_loads",
        _C,
        "Ended loads of a model for its wish.",
        _read_actions(lambda counters: counters.loads),
        (("model", "a model that had a wish"), _OUTCOME),
        "after the first load with this outcome",
    ),
    MetricFamily(
        "wish_unloads",
        _C,
        "Ended unloads of a model because it was idle, or for the wish for another model.",
        _read_actions(lambda counters: counters.unloads),
        (("model", "a model of a member"), _OUTCOME),
        "after the first unload with this outcome",
    ),
)
