"""Takes metric snapshots of the coordinator and of every node, and lists the targets for Prometheus.

A snapshot is taken in one step on the loop and serialized on a thread, because streams must not wait for a scrape. A
node that does not answer has no snapshot: its scrape fails, and Prometheus reports `up 0` instead of old numbers.
"""

import asyncio
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from coordinator.cluster.registry import Registry
from coordinator.metrics.exposition import render
from coordinator.metrics.families import CollectedFamily, collect
from coordinator.metrics.labels import AdmittedLabels
from coordinator.metrics.node import NODE, NodeSnapshot, by_priority, sanitize_measures
from coordinator.metrics.pool import POOL, LinkCounts, PoolSnapshot, ProcessMetrics
from coordinator.video.metrics import VideoSnapshot
from router.admission.api_keys import KeyRing
from router.dispatch.dispatcher import Dispatcher
from router.placement.cluster_view import NodeView
from wire.histogram import NodeMeasures
from wire.identity import NodeId
from wire.node_state import SCRAPABLE, NodeState

MEASURES_TIMEOUT_SECONDS = 3.0
"""Maximum seconds to wait for a node's measurements; less than the timeout of Prometheus."""
MAX_MEASURES_BYTES = 16 * 1024
VALIDITY_CACHE_SECONDS = 60.0
"""Seconds for which the validity of certificates is cached, because it is read from files."""
Lives = Mapping[str, tuple[float, float]]


class NodeUnreachable(Exception):
    """Raised if the metrics of a node are not available now. The text has the reason."""


class MetricsService:
    """Source of all metrics of the coordinator and of the nodes.

    `lives` reads the validity of certificates by name. `conditions` returns by alert rule whether it is active, and
    `video` the metrics of video jobs.
    """

    def __init__(
        self, registry: Registry, dispatcher: Dispatcher, ring: KeyRing, version: str, lives: Callable[[], Lives]
    ) -> None:
        self._registry = registry
        self._dispatcher = dispatcher
        self._ring = ring
        self._version = version
        self._read_lives = lives
        self._lives: Lives = {}
        self._lives_at: float | None = None
        self._started = time.time()
        self._labels = AdmittedLabels()
        self.conditions: Callable[[], Mapping[str, bool]] = dict
        self.video: Callable[[], VideoSnapshot] = VideoSnapshot

    async def pool(self, accept: str) -> tuple[bytes, str]:
        """Return the coordinator's metrics in the format that an Accept header requests, with the content type."""
        return await asyncio.to_thread(render, collect(POOL, self.snapshot()), accept)

    async def node(self, node: NodeId, accept: str) -> tuple[bytes, str]:
        """Return a node's metrics as `pool`. Raise `NodeUnreachable` if the node does not answer or has left."""
        measures = await self._measures(node)
        view = self._registry.build_view().node(node)
        if view is None:
            raise NodeUnreachable("it is no member any more")
        return await asyncio.to_thread(render, self.collect_node(view, measures), accept)

    def targets(self, host: str, scheme: str) -> list[dict[str, Any]]:
        """Return the targets of Prometheus service discovery: one per member, at the coordinator's address.

        `host` and `scheme` are those of the request. The scrape of a member that does not answer fails.
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
            for node in self._registry.build_view().nodes
            if node.state != NodeState.LEFT
        ]

    def collect_node(self, view: NodeView, measures: NodeMeasures | None) -> list[CollectedFamily[NodeSnapshot]]:
        """Return the metric families of a node with their series, by its newest report and these measurements."""
        return collect(NODE, self.node_snapshot(view, measures))

    def node_snapshot(self, view: NodeView, measures: NodeMeasures | None) -> NodeSnapshot:
        """Return the metrics snapshot of a node by its newest report and these measurements."""
        wall = time.time()
        reported_at = wall - max(0.0, self._dispatcher.now() - view.reported_at)
        about = self._labels.about(view.id, self._registry.describe_host(view.id))
        return NodeSnapshot(view, reported_at, wall, about, self._labels.models(view.id, by_priority(view)), measures)

    def nodes(self) -> list[NodeSnapshot]:
        """Return the snapshots of all nodes with a current report, without measurements.

        No request is sent to a node.
        """
        views = self._registry.build_view().nodes
        return [self.node_snapshot(view, None) for view in views if view.state in SCRAPABLE and view.reported_at]

    async def _measures(self, node: NodeId) -> NodeMeasures | None:
        """Fetch the measurements of a node; None if they are invalid, in which case only its histograms are missing.

        Raise `NodeUnreachable` if the node does not answer.
        """
        view = self._registry.build_view().node(node)
        if view is None or view.state not in SCRAPABLE or not view.reported_at:
            raise NodeUnreachable(f"it is {view.state if view else 'unknown'}")
        pieces = self._registry.links.fetch_source(node, "metrics", MAX_MEASURES_BYTES)
        try:
            async with asyncio.timeout(MEASURES_TIMEOUT_SECONDS):
                return read_measures(b"".join([piece async for piece in pieces]))
        except (LookupError, TimeoutError) as error:
            raise NodeUnreachable(str(error) or "it did not answer") from None

    def snapshot(self) -> PoolSnapshot:
        """Return the metrics snapshot of the coordinator, without requests to nodes."""
        dispatcher, registry = self._dispatcher, self._registry
        view, now, links = dispatcher.view, dispatcher.now(), registry.links
        members = [node.id for node in view.nodes]
        self._labels.keep(members)
        keys = self._ring.names()
        dispatcher.counters.forget_keys(keys)
        return PoolSnapshot(
            version=self._version,
            python=platform.python_version(),
            wall=time.time(),
            now=now,
            view=view,
            states=registry.count_states(),
            self_suspect=registry.pool.self_suspect,
            counters=dispatcher.counters,
            keys=keys,
            in_flight={node: dispatcher.in_flight(node) for node in members},
            unacknowledged={node: dispatcher.ledger.unacknowledged(node) for node in members},
            leaks=dispatcher.leaks(),
            barred=frozenset(dispatcher.breakers.barred_nodes(now)),
            opened_breakers=dispatcher.breakers.opened,
            waiting=dispatcher.waiting(),
            queue_limit=dispatcher.queue.limit(len(members)),
            oldest=dispatcher.queue.oldest(now),
            keys_refused=self._ring.refused,
            certificates=self._our_lives(now),
            node_certificates=links.get_certificate_validity(),
            links=LinkCounts(links.count_links(), links.count_unlinked(), links.made, links.denied),
            conditions=self.conditions(),
            process=self._process(),
            video=self.video(),
        )

    def _our_lives(self, now: float) -> Lives:
        if self._lives_at is None or now - self._lives_at > VALIDITY_CACHE_SECONDS:
            self._lives, self._lives_at = self._read_lives(), now
        return self._lives

    def _process(self) -> ProcessMetrics:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return ProcessMetrics(
            self._started,
            time.process_time(),
            peak if sys.platform == "darwin" else peak * 1024,
            len(os.listdir("/dev/fd")) - 1,
            resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        )


def read_measures(answer: bytes) -> NodeMeasures | None:
    """Decode a node's measurements (msgpack) and remove impossible numbers. Return None if the bytes are invalid."""
    try:
        return sanitize_measures(msgspec.msgpack.decode(answer, type=NodeMeasures))
    except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError):
        return None
