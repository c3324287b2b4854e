"""Source of the metrics of the coordinator and of every node, and the list of targets for Prometheus.

A snapshot is taken in one step on the loop and serialized on a thread, because streams must not wait for a scrape. A
node that does not answer has no snapshot: its scrape fails, and Prometheus reports `up 0` instead of old numbers.
"""

import asyncio
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from coordinator.cluster.assembly import NodePool
from coordinator.metrics.families import CollectedFamily, collect_families
from coordinator.metrics.labels import AdmittedLabels
from coordinator.metrics.node_families import NODE
from coordinator.metrics.node_snapshot import NodeSnapshot, sanitize_measures, sort_by_priority
from coordinator.metrics.pool_families import POOL
from coordinator.metrics.pool_snapshot import LinkCounts, PoolSnapshot, ProcessMetrics
from coordinator.models.wish_counters import WishSnapshot
from coordinator.video.metrics import VideoSnapshot
from router.admission.api_keys import KeyRing
from router.dispatch.dispatcher import Dispatcher
from router.placement.cluster_view import NodeView
from wire.histogram import NodeMeasures
from wire.identity import NodeId
from wire.node_state import SCRAPABLE, NodeState

MEASURES_TIMEOUT_SECONDS = 3.0
"""Maximum seconds to wait for a node's measurements, below the scrape timeout of Prometheus."""
MAX_MEASURES_BYTES = 16 * 1024
"""Maximum bytes of a node's measurements."""
VALIDITY_CACHE_SECONDS = 60.0
"""Seconds for which the validity of certificates is cached, because it is read from files."""
Validities = Mapping[str, tuple[float, float]]
"""Times of issue and expiry of certificates in Unix seconds, by name."""


class NodeUnreachable(Exception):
    """Raised if the metrics of a node are currently not available. The text has the reason."""


class MetricsSource:
    """Source of all metrics of the coordinator and of the nodes.

    `read_validities` reads the validity of the coordinator's certificates. `get_conditions` returns whether the
    condition of each alert rule is active. `get_video_snapshot` returns the metrics of video jobs, `get_wish_snapshot`
    those of wishes. `count_unwritten` returns the number of changes that wait for the disk
    (`Database.count_unwritten`).
    """

    def __init__(
        self,
        nodes: NodePool,
        dispatcher: Dispatcher,
        ring: KeyRing,
        version: str,
        read_validities: Callable[[], Validities],
        get_conditions: Callable[[], Mapping[str, bool]],
        get_video_snapshot: Callable[[], VideoSnapshot],
        get_wish_snapshot: Callable[[], WishSnapshot],
        count_unwritten: Callable[[], int],
    ) -> None:
        self._nodes = nodes
        self._dispatcher = dispatcher
        self._ring = ring
        self._version = version
        self._read_validities = read_validities
        self._validities: Validities = {}
        self._validities_at: float | None = None
        self._started = time.time()
        self._labels = AdmittedLabels()
        self._get_conditions = get_conditions
        self._get_video_snapshot = get_video_snapshot
        self._get_wish_snapshot = get_wish_snapshot
        self._count_unwritten = count_unwritten

    async def render_pool(self, accept: str) -> tuple[bytes, str]:
        """Return the coordinator's metrics, in the format that an Accept header requests, and the content type.

        Label values of former nodes and counters of former keys are deleted first (`take_snapshot`).
        """
        return await asyncio.to_thread(_render, collect_families(POOL, self.take_snapshot()), accept)

    async def render_node(self, node: NodeId, accept: str) -> tuple[bytes, str]:
        """Return a node's metrics, in the format that an Accept header requests, and the content type.

        If the node sends invalid measurements, its histograms are missing. Raise `NodeUnreachable` if the node is
        absent, is not a member, or does not answer within `MEASURES_TIMEOUT_SECONDS`.
        """
        measures = await self._fetch_measures(node)
        view = self._nodes.registry.build_view().find_node(node)
        if view is None:
            raise NodeUnreachable("it is no member any more")
        return await asyncio.to_thread(_render, self.collect_node(view, measures), accept)

    def list_targets(self, host: str, scheme: str) -> list[dict[str, Any]]:
        """Return the targets of Prometheus service discovery: one for each member that has not left.

        All targets have the coordinator's address, with the `host` and `scheme` that the client used. The scrape of a
        member that does not answer fails.
        """
        return [
            {
                "targets": [host],
                "labels": {
                    "__metrics_path__": f"/prometheus/nodes/{node.id}",
                    "__scheme__": scheme,
                    "node": node.name,
                    "instance": node.name,
                },
            }
            for node in self._nodes.registry.build_view().nodes
            if node.state != NodeState.LEFT
        ]

    def collect_node(self, view: NodeView, measures: NodeMeasures | None) -> list[CollectedFamily[NodeSnapshot]]:
        """Return the metric families of a node with their series, from its newest report and its measurements.

        If `measures` is None, the histograms and the metrics of the agent's process are missing, and the checks and
        refusals of the gate are totals. Raise `KeyError` for an unknown node.
        """
        return collect_families(NODE, self.take_node_snapshot(view, measures))

    def take_node_snapshot(self, view: NodeView, measures: NodeMeasures | None) -> NodeSnapshot:
        """Return the metrics snapshot of a node, from its newest report and its measurements, if any.

        New label values of the node are admitted within their limits. Raise `KeyError` for an unknown node.
        """
        wall = time.time()
        reported_at = wall - max(0.0, self._dispatcher.get_time() - view.reported_at)
        about = self._labels.admit_host(view.id, self._nodes.directory.describe_host(view.id))
        return NodeSnapshot(
            view, reported_at, wall, about, self._labels.admit_models(view.id, sort_by_priority(view)), measures
        )

    def take_node_snapshots(self) -> list[NodeSnapshot]:
        """Return the snapshots of all nodes with a current report, without measurements.

        No request is sent to a node.
        """
        views = self._nodes.registry.build_view().nodes
        return [self.take_node_snapshot(view, None) for view in views if view.state in SCRAPABLE and view.reported_at]

    async def _fetch_measures(self, node: NodeId) -> NodeMeasures | None:
        """Fetch the measurements of a node; None if they are invalid, in which case only its histograms are missing.

        Raise `NodeUnreachable` if the node does not answer.
        """
        view = self._nodes.registry.build_view().find_node(node)
        if view is None or view.state not in SCRAPABLE or not view.reported_at:
            raise NodeUnreachable(f"it is {view.state if view else 'unknown'}")
        pieces = self._nodes.links.fetches.fetch_source(node, "metrics", MAX_MEASURES_BYTES)
        try:
            async with asyncio.timeout(MEASURES_TIMEOUT_SECONDS):
                return decode_measures(b"".join([piece async for piece in pieces]))
        except (LookupError, TimeoutError) as error:
            raise NodeUnreachable(str(error) or "it did not answer") from None

    def take_snapshot(self) -> PoolSnapshot:
        """Return the metrics snapshot of the coordinator, without requests to nodes.

        Also delete the admitted label values of former nodes, and the counters of keys that no longer exist.
        """
        dispatcher, nodes = self._dispatcher, self._nodes
        view, now, links, server = dispatcher.view, dispatcher.get_time(), nodes.links.table, nodes.server
        members = [node.id for node in view.nodes]
        self._labels.retain_members(members)
        keys = self._ring.get_names()
        dispatcher.counters.retain_keys(keys)
        return PoolSnapshot(
            version=self._version,
            python=platform.python_version(),
            wall=time.time(),
            now=now,
            view=view,
            states=nodes.directory.count_states(),
            self_suspect=nodes.registry.pool.self_suspect,
            unwritten=self._count_unwritten(),
            counters=dispatcher.counters,
            keys=keys,
            in_flight={node: dispatcher.count_in_flight(node) for node in members},
            unacknowledged={node: dispatcher.ledger.get_unacknowledged_bytes(node) for node in members},
            leaks=dispatcher.count_leaks(),
            barred=frozenset(dispatcher.breakers.list_barred_nodes(now)),
            opened_breakers=dispatcher.breakers.opened,
            waiting=dispatcher.count_queued(),
            queue_limit=dispatcher.queue.compute_limit(len(members)),
            oldest_wait_seconds=dispatcher.queue.get_longest_wait(now),
            keys_refused=self._ring.refused,
            certificates=self._get_validities(now),
            node_certificates=links.get_certificate_validity(),
            links=LinkCounts(len(links), server.count_unlinked(), server.established, server.denied),
            conditions=self._get_conditions(),
            process=self._read_process_metrics(),
            video=self._get_video_snapshot(),
            wishes=self._get_wish_snapshot(),
        )

    def _get_validities(self, now: float) -> Validities:
        if self._validities_at is None or now - self._validities_at > VALIDITY_CACHE_SECONDS:
            self._validities, self._validities_at = self._read_validities(), now
        return self._validities

    def _read_process_metrics(self) -> ProcessMetrics:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        max_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return ProcessMetrics(
            self._started,
            time.process_time(),
            peak if sys.platform == "darwin" else peak * 1024,
            _count_open_files(max_files),
            max_files,
        )


def _count_open_files(max_files: int) -> int:
    """Return the number of open files of this process: `max_files` if no file is free for the count."""
    try:
        return len(os.listdir("/dev/fd")) - 1
    except OSError:
        return max_files


def decode_measures(answer: bytes) -> NodeMeasures | None:
    """Decode a node's measurements (msgpack) and remove impossible numbers. Return None if the bytes are invalid."""
    try:
        return sanitize_measures(msgspec.msgpack.decode(answer, type=NodeMeasures))
    except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError):
        return None


def _render(collected: Iterable[CollectedFamily[Any]], accept: str) -> tuple[bytes, str]:
    # prometheus-client takes a fortieth of the CPU time of a start, and many pools are never scraped
    from coordinator.metrics.exposition import render_metrics

    return render_metrics(collected, accept)
