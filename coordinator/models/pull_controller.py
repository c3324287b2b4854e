"""Controller of pulls, which passes events to their state machines and performs the actions, on the coordinator's loop.

`pull_state` makes all decisions. A pull survives restarts of the coordinator (`PullRecords`) and of nodes, which keep
the received pieces on their disks.
"""

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from coordinator.cluster.links.relay import RelayTransfers
from coordinator.model_tools.quantizations import Quantizations
from coordinator.models.hub_client import HubClient, TokenFileError
from coordinator.models.model_orders import ModelOrders
from coordinator.models.pull_records import MAX_ENDED_RECORDS, PullRecord, PullRecords
from coordinator.models.pull_state import find_deadline, restore_pull, step
from coordinator.models.pull_values import (
    ENDED,
    Action,
    Event,
    Mirror,
    NodeLinked,
    NodePull,
    NodeUnlinked,
    OrderEnded,
    OrderProgressed,
    PullCancelled,
    PullNodeRemoved,
    PullStage,
    PullState,
    SendCancel,
    SendPull,
    SendServe,
    StorePull,
    TimePassed,
    is_pulling,
    list_unfailed,
)
from router.placement.cluster_view import ClusterView
from wire.frames import (
    CancelModelOrder,
    Frame,
    ModelOrderCode,
    ModelOrderEnded,
    ModelOrderProgress,
    PullModel,
    ServeModel,
)
from wire.identity import NodeId
from wire.models.files import ModelManifest, ModelSource, SourceKind
from wire.node_state import LINKED
from wire.refusals import RefusalCode, Refused
from wire.state_machine import IllegalEventCounts, StateMachine
from wire.units import show_size

MODEL_ORDER_FRAMES = (ModelOrderProgress, ModelOrderEnded)
MAX_OPEN_PULLS = 16
PULL_BITS = 20
"""Number of the lowest bits of an order number, which count the orders of one pull."""

log = structlog.get_logger("coordinator.models.pull_controller")


class TooManyPullsError(Exception):
    """Raised if `MAX_OPEN_PULLS` pulls are open. The text has the limit and the next step."""


class PullController:
    """Controller of all pulls, and of the other orders about model files (`orders`, `quantizations`).

    `state` is the state folder. `send` sends a frame to a node and returns False if the node is not linked. `transfers`
    are the transfers that the cluster port relays. `epoch` is the number of the coordinator's start, which makes order
    numbers unique. `wall` returns Unix seconds.
    """

    def __init__(
        self,
        state: Path,
        hub: HubClient,
        send: Callable[[NodeId, Frame], bool],
        transfers: RelayTransfers,
        epoch: int,
        illegal_events: IllegalEventCounts,
        *,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.hub = hub
        self._send = send
        self._transfers = transfers
        self._illegal_events = illegal_events
        self._wall = wall
        self._loop = asyncio.get_running_loop()
        self._records = PullRecords(state)
        self._bases = (epoch << 40 | number << PULL_BITS for number in itertools.count(1))
        counter = itertools.count(1)
        self.orders = ModelOrders(send, lambda: epoch << 40 | next(counter))
        self.quantizations = Quantizations(state, send, lambda: epoch << 40 | next(counter), wall=wall)
        self._links: dict[NodeId, int] = {}
        self._tokens: dict[int, str] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._has_view = False
        self.pulls: dict[str, PullRecord] = {}
        """All pulls by id, oldest first."""
        for record in self._records.load():
            restored = record if record.ended else record.set_state(self._restore(record.state), wall())
            self.pulls[record.id] = restored

    def _restore(self, state: PullState) -> PullState:
        return restore_pull(state, next(self._bases))

    def close(self) -> None:
        """Stop the controller. Downloads and quantizations continue on their nodes."""
        self.quantizations.close()
        if self._timer is not None:
            self._timer.cancel()

    # -- commands of administrators ---------------------------------------------------------

    def start_pull(self, manifest: ModelManifest, nodes: Sequence[NodeId], actor: str) -> PullRecord:
        """Start a pull of `manifest` on nodes, and return its record, which is stored on the disk.

        The first linked node downloads from the hub. If an open pull has the same files, includes all these nodes and
        has failed on none of them, that pull is returned instead. The oldest ended records above `MAX_ENDED_RECORDS`
        are deleted. `actor` is the actor for the record (`AuditRow.actor`). Raise `TooManyPullsError`, or `OSError` if
        the record cannot be written.
        """
        opened = [record for record in self.pulls.values() if record.ended is None]
        for record in opened:
            if record.manifest == manifest and set(nodes) <= list_unfailed(record.state):
                return record
        if len(opened) >= MAX_OPEN_PULLS:
            raise TooManyPullsError(f"{MAX_OPEN_PULLS} pulls are open, which is the limit: wait for one to end")
        state = PullState({node: NodePull() for node in nodes}, next(self._bases))
        record = PullRecord(
            id=f"pull-{secrets.token_hex(6)}", manifest=manifest, state=state, started=self._wall(), actor=actor
        )
        self._records.store(record)
        self.pulls[record.id] = record
        self._delete_old_records()
        log.info("pull started", pull=record.id, repo=manifest.repo, commit=manifest.commit, nodes=len(nodes))
        for node in nodes:
            if node in self._links:
                self._apply(record.id, NodeLinked(node))
        return self.pulls[record.id]

    def cancel_pull(self, pull: str) -> bool:
        """Cancel a pull. The nodes keep received pieces on their disks. Return False if no open pull has this id."""
        record = self.pulls.get(pull)
        if record is None or record.ended is not None:
            return False
        self._apply(pull, PullCancelled())
        return True

    def _delete_old_records(self) -> None:
        ended = [record.id for record in self.pulls.values() if record.ended is not None]
        for pull in ended[:-MAX_ENDED_RECORDS]:
            del self.pulls[pull]
            try:
                self._records.delete(pull)
            except OSError as error:
                log.warning("pull not deleted", pull=pull, why=str(error))

    def find_waiting_refusal(self, model: str) -> Refused | None:
        """Return the refusal of a request for a model that a node is pulling; None if no node is pulling it.

        The text has the progress and the expected time left. The refusal is not final: the request waits for the model
        in the queue.
        """
        return next((refused for refused in map(self._refuse_for_now, self._find_open_pulls(model)) if refused), None)

    def _find_open_pulls(self, model: str) -> list[PullRecord]:
        return [record for record in self.pulls.values() if record.ended is None and record.manifest.repo == model]

    def _refuse_for_now(self, record: PullRecord) -> Refused | None:
        pulling = [node for node in record.state.nodes.values() if is_pulling(node)]
        if not pulling:
            return None
        first = max(pulling, key=lambda node: node.done)
        left = (first.total - first.done) / first.speed if first.speed > 0 else None
        share = f"{first.done / first.total:.0%} of {show_size(first.total)}" if first.total else "it begins"
        after = "" if left is None else f", about {left:.0f} s left"
        text = f"{record.manifest.repo} is being pulled ({share}{after}): wait, or look at `cluster pulls`"
        return Refused(RefusalCode.NOT_READY, text, None, min(60.0, max(5.0, left or 30.0)))

    # -- events of nodes --------------------------------------------------------------------

    def apply_view(self, view: ClusterView) -> None:
        """Compare the links of the nodes with the last view, and apply the changes to open pulls and quantizations.

        At the first view, end pulls and quantizations on former members, which left before the coordinator started.
        """
        if not self._has_view:
            self._has_view = True
            self._remove_former_members(view)
        links = {node.id: node.epoch for node in view.nodes if node.state in LINKED}
        if links == self._links:
            return
        before, self._links = self._links, links
        returned = [node for node, epoch in links.items() if before.get(node) != epoch]
        self.quantizations.apply_links(before.keys() - links.keys(), returned)
        for node in before.keys() - links.keys():
            self._apply_to_open_pulls(node, NodeUnlinked(node))
        for node in returned:
            self._apply_to_open_pulls(node, NodeLinked(node))

    def _remove_former_members(self, view: ClusterView) -> None:
        opened = (record for record in self.pulls.values() if record.ended is None)
        nodes = {node for record in opened for node in record.state.nodes}
        nodes |= {record.node for record in self.quantizations.list_all()}
        for node in sorted(nodes - {member.id for member in view.nodes}):
            self.remove_node(node)

    def handle_frame(self, node: NodeId, frame: ModelOrderProgress | ModelOrderEnded) -> None:
        """Process a frame of a node about an order of a pull, an awaited order, or a quantization.

        Frames about unknown orders are ignored. A node that works on a cancelled pull gets the cancel again, because it
        may not have been linked before.
        """
        if isinstance(frame, ModelOrderProgress) and self._is_cancelled(node, frame.order):
            self._send(node, CancelModelOrder(frame.order))
            return
        event = OrderProgressed(node, frame) if isinstance(frame, ModelOrderProgress) else OrderEnded(node, frame)
        self.orders.handle_frame(node, frame)
        self.quantizations.handle_frame(node, frame)
        self._apply_to_open_pulls(node, event)

    def _is_cancelled(self, node: NodeId, order: int) -> bool:
        """Return whether an order is the newest one of a cancelled pull on a node."""
        pulls = (record.state.nodes.get(node) for record in self.pulls.values())
        return any(pull is not None and (pull.stage, pull.order) == (PullStage.CANCELLED, order) for pull in pulls)

    def handle_lost_node(self, node: NodeId) -> None:
        """End the awaited orders of a node whose link is lost."""
        self.orders.handle_lost_node(node)

    def remove_node(self, node: NodeId) -> None:
        """End the quantizations of a node that has left the pool, and fail its part of each open pull.

        The pulls continue on their other nodes.
        """
        self._links.pop(node, None)
        self.quantizations.remove_node(node)
        self._apply_to_open_pulls(node, PullNodeRemoved(node))

    def _apply_to_open_pulls(self, node: NodeId, event: Event) -> None:
        for pull, record in list(self.pulls.items()):
            if record.ended is None and node in record.state.nodes:
                self._apply(pull, event)

    # -- state machine ----------------------------------------------------------------------

    def _apply(self, pull: str, event: Event) -> None:
        before = self.pulls[pull]
        with self._illegal_events.count_errors(StateMachine.PULL):
            state, actions = step(before.state, event, self._loop.time())
        record = self.pulls[pull] = before.set_state(state, self._wall())
        self._log_changes(before, record)
        for action in actions:
            self._perform(record, action)
        self._close_ended_mirror(before.state.mirror, state.mirror)
        self._schedule()

    def _close_ended_mirror(self, before: Mirror | None, after: Mirror | None) -> None:
        if before is not None and (after is None or after.order != before.order):
            self._transfers.close(self._tokens.pop(before.order, ""))

    def _log_changes(self, before: PullRecord, after: PullRecord) -> None:
        for name, node in after.state.nodes.items():
            former = before.state.nodes[name]
            if node.stage in ENDED and former.stage not in ENDED:
                log.info(
                    "pull ended",
                    pull=after.id,
                    repo=after.manifest.repo,
                    node=name,
                    stage=str(node.stage),
                    fetched=node.fetched,
                    why=node.message,
                )
            elif node.message and node.message != former.message:
                log.warning("pull delayed", pull=after.id, repo=after.manifest.repo, node=name, why=node.message)

    def _perform(self, record: PullRecord, action: Action) -> None:
        match action:
            case SendPull():
                self._send_pull(record.manifest, action)
            case SendServe():
                token = self._tokens[action.order] = secrets.token_urlsafe(32)
                self._transfers.open(token, action.node, frozenset(record.state.nodes))
                self._send(action.node, ServeModel(action.order, record.manifest, token, relay=True))
            case SendCancel():
                self._send(action.node, CancelModelOrder(action.order))
            case StorePull():
                self._store(record)

    def _send_pull(self, manifest: ModelManifest, action: SendPull) -> None:
        try:
            sources = self._build_sources(action)
        except TokenFileError as error:
            ended = ModelOrderEnded(action.order, ModelOrderCode.GATED, str(error))
            self._loop.call_soon(self._apply_to_open_pulls, action.node, OrderEnded(action.node, ended))
            return
        self._send(action.node, PullModel(action.order, manifest, sources))

    def _build_sources(self, action: SendPull) -> tuple[ModelSource, ...]:
        """Return the sources of an order. Raise TokenFileError if the token of the hub cannot be read."""
        mirror = action.mirror
        if mirror is None:
            return (ModelSource(SourceKind.HUB, self.hub.endpoint, self.hub.read_token()),)
        token = self._tokens.get(mirror.order, "")
        mirrors = (ModelSource(SourceKind.MIRROR, url, token, mirror.node) for url in mirror.addresses)
        return (*mirrors, ModelSource(SourceKind.RELAY, "", token, mirror.node))

    def _store(self, record: PullRecord) -> None:
        try:
            self._records.store(record)
        except OSError as error:
            log.warning("pull not stored", pull=record.id, why=str(error))

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        deadlines = [find_deadline(record.state) for record in self.pulls.values() if record.ended is None]
        due = min((deadline for deadline in deadlines if deadline is not None), default=None)
        self._timer = None if due is None else self._loop.call_at(due, self._tick)

    def _tick(self) -> None:
        now = self._loop.time()
        for pull, record in list(self.pulls.items()):
            due = find_deadline(record.state) if record.ended is None else None
            if due is not None and due <= now:
                self._apply(pull, TimePassed())
        self._schedule()
