"""Newest report and software version of each node, and its view for placement."""

import asyncio
import operator
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from coordinator.cluster.member_state import Member
from coordinator.state.database import Database
from coordinator.state.rows import MemberRow
from router.placement.cluster_view import NodeView
from router.placement.sanitize_report import build_node_view
from wire.bonjour_record import sanitize_text
from wire.frames import Hello, Report
from wire.identity import NodeId
from wire.node_state import EngineStage, NodeState
from wire.report import Model


@dataclass(frozen=True, slots=True)
class ReceivedReport:
    """Newest report of a node, with its time of arrival `at` in seconds of the loop's clock."""

    report: Report
    at: float


class _CachedView(NamedTuple):
    """View of a node, with the values from which it was built."""

    view: NodeView
    values: tuple[Member, MemberRow, ReceivedReport | None, bool]


class NodeRecords:
    """Newest reports and software versions by node. `store` has the members' names, labels and permissions."""

    def __init__(self, store: Database) -> None:
        self._store = store
        self._received: dict[NodeId, ReceivedReport] = {}
        self._report_events: dict[NodeId, asyncio.Event] = {}
        self._software: dict[NodeId, Hello] = {}
        self._views: dict[NodeId, _CachedView] = {}

    def record_report(self, node: NodeId, report: Report, now: float) -> None:
        """Record the newest report of a node, received at `now` (seconds of the loop's clock).

        While the engine of a node starts, its reports contain no models. The models of the former report are then kept
        as not loaded, because requests for an unknown model would fail. Requests for these models wait for the engine.
        """
        former = self._received.get(node)
        if former is not None and _is_starting(report):
            report = replace(report, models=_unload_all(former.report.models))
        self._received[node] = ReceivedReport(report, now)
        if (event := self._report_events.pop(node, None)) is not None:
            event.set()

    def record_software(self, node: NodeId, hello: Hello) -> None:
        """Record the software of a node from its Hello: versions of Macpool and of the protocol, and known frames."""
        self._software[node] = hello

    def delete(self, node: NodeId) -> None:
        """Delete all records of a node, and end all waits for its next report."""
        if (event := self._report_events.pop(node, None)) is not None:
            event.set()
        for by_node in (self._received, self._software, self._views):
            by_node.pop(node, None)

    async def wait_for_report(self, node: NodeId) -> None:
        """Wait until the next report of a node, or the deletion of its records. The wait has no time limit."""
        await self._report_events.setdefault(node, asyncio.Event()).wait()

    def get_reported_at(self, node: NodeId) -> float | None:
        """Return when the newest report of a node arrived, in seconds of the loop's clock; None without a report."""
        received = self._received.get(node)
        return None if received is None else received.at

    def list_reported(self) -> list[NodeId]:
        """Return the nodes that have sent a report, in the order of their first reports."""
        return list(self._received)

    def get_software(self, node: NodeId) -> tuple[str, int]:
        """Return a node's version of Macpool and protocol version; empty and 0 before its first Hello."""
        hello = self._software.get(node)
        return ("", 0) if hello is None else (sanitize_text(hello.version), hello.protocol)

    def get_view(self, member: Member, *, expected: bool) -> NodeView:
        """Return the view of a member for placement. It stays the same object until one of its values changes.

        The view of a node that has left is built without its last report, because the cluster no longer has its models.
        `expected` is whether the node is expected to connect, because the coordinator has just started. Raise
        `KeyError` if the store does not have the member.
        """
        node = member.node
        row, cached = self._store.members[node], self._views.get(node)
        received = None if member.state is NodeState.LEFT else self._received.get(node)
        awaited = expected and member.enrolled and (received is None or _is_starting(received.report))
        values = (member, row, received, awaited)
        if cached is not None and all(map(operator.is_, cached.values, values)):
            return cached.view
        hello = self._software.get(node)
        view = _build_view(*values, frozenset() if hello is None else frozenset(hello.frames))
        self._views[node] = _CachedView(view, values)
        return view


def _is_starting(report: Report) -> bool:
    """Return whether a report has no models because the engine starts."""
    return not report.models and report.engine.state != EngineStage.READY


def _unload_all(models: tuple[Model, ...]) -> tuple[Model, ...]:
    return tuple(replace(model, loaded=False, loading=False, groups=()) for model in models)


def _build_view(
    member: Member, row: MemberRow, received: ReceivedReport | None, awaited: bool, frames: frozenset[int]
) -> NodeView:
    labels = frozenset(row.labels)
    if received is None:
        return NodeView(
            row.node, row.name, member.state, member.cordoned, labels=labels, video_allowed=row.video, awaited=awaited
        )
    return build_node_view(
        received.report,
        node=row.node,
        name=row.name,
        state=member.state,
        reported_at=received.at,
        cordoned=member.cordoned,
        epoch=member.link,
        labels=labels,
        video_allowed=row.video,
        frames=frames,
        awaited=awaited,
    )
