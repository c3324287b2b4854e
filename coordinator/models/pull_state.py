"""State machine of a pull: events in, actions out. `pull_controller` performs the actions. Pure.

A pull brings the files of one manifest to several nodes. One node downloads from the hub. That node is also the mirror
from which the remaining nodes get the files, during the download. If that node fails, another node takes its place. A
node that cannot get the files from a mirror also downloads from the hub.

    waiting ─(order sent)─► pulling ─(completed)─► completed
    ▲                       ├─(source lost, rate limit, node lost)─► waiting
    └───────────────────────┘└─(final fault)─► failed;  cancelled from every open stage
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from msgspec.structs import replace as replace_frame

from coordinator.models.pull_values import (
    ENDED,
    Action,
    Event,
    Mirror,
    NodeLinked,
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
    Step,
    StorePull,
    TimePassed,
    has_files,
    is_downloading,
    is_pulling,
)
from wire.frames import ModelOrderCode, ModelOrderEnded, ModelOrderProgress
from wire.identity import NodeId
from wire.models.files import SourceKind
from wire.state_machine import IllegalEventError

MAX_RETRIES = 8
"""Maximum retries of one node without progress. At the next fault, the pull fails on that node."""
MAX_MIRROR_RETRIES = 2
"""Number of retries without progress after which a node uses the hub although a mirror is open."""
FIRST_RETRY_SECONDS = 2.0
"""Seconds before the first retry of a node. Each retry without progress doubles them.

If a fault has a wait of its own (`ModelOrderEnded.retry_after`), the retry follows after that wait.
"""
MAX_RATE_LIMIT_SECONDS = 3600.0
"""Maximum wait after a rate limit of the hub, in seconds. If the hub requires more, the pull fails on the node."""
UNLINKED_SECONDS = 60.0
"""Seconds without a link after which a node's order counts as lost. Another node can then download in its place."""
MIRROR_START_SECONDS = 20.0
"""Maximum seconds in which a node must open its mirror. After that, its order is cancelled and another node serves."""
_FATAL = frozenset({ModelOrderCode.NOT_FOUND, ModelOrderCode.GATED, ModelOrderCode.INVALID})
"""Codes that are faults of the repository if they come from the hub. They would occur on every node."""


def restore_pull(state: PullState, next_order: int) -> PullState:
    """Return the state of a pull after a restart of the coordinator, before any node is linked.

    Nodes that were pulling get a new order, which continues the download in progress. `next_order` is higher than all
    order numbers of former starts. A node keeps the number of its former order until it gets the new one, because a
    cancel of the download needs that number.
    """
    nodes = {
        name: replace(node, is_linked=False, stage=PullStage.WAITING, retry_at=0.0)
        if node.stage not in ENDED
        else replace(node, is_linked=False)
        for name, node in state.nodes.items()
    }
    return PullState(nodes, next_order)


def find_deadline(state: PullState) -> float | None:
    """Return when the next `TimePassed` is due, in seconds of the controller's clock; None if it is not needed."""
    if state.has_ended:
        return None
    return min(_list_deadlines(state), default=None)


def _list_deadlines(state: PullState) -> Iterator[float]:
    for node in state.nodes.values():
        if node.stage is PullStage.WAITING and node.is_linked and node.retry_at:
            yield node.retry_at
        if is_pulling(node) and not node.is_linked:
            yield node.unlinked_at + UNLINKED_SECONDS
    if state.mirror is not None and not state.mirror.addresses:
        yield state.mirror.begun + MIRROR_START_SECONDS


def step(state: PullState, event: Event, now: float) -> Step:
    """Apply one event at `now` (seconds of the controller's clock). Return the new state and the actions in order.

    Frames about former orders change nothing. Raise `IllegalEventError` for a node that does not belong to the pull.
    Raise `InvariantError` if the new state contradicts itself, which only a bug can cause.
    """
    node = getattr(event, "node", None)
    if node is not None and node not in state.nodes:
        raise IllegalEventError(f"{node} does not belong to this pull: {event}")
    before = state
    after, actions = _apply(state, event, now)
    after, planned = _plan(after, now)
    after.check()
    stored = _summarize(before) != _summarize(after)
    return after, (*actions, *planned, *((StorePull(),) if stored else ()))


def _summarize(state: PullState) -> tuple[tuple[PullStage, str], ...]:
    return tuple((node.stage, node.message) for node in state.nodes.values())


def _apply(state: PullState, event: Event, now: float) -> Step:
    match event:
        case NodeLinked():
            return _record_link(state, event.node)
        case NodeUnlinked():
            return _record_unlink(state, event.node, now)
        case PullNodeRemoved():
            unlinked = _change(state, event.node, is_linked=False)
            return _end(
                _drop_mirror_of(unlinked, event.node), event.node, PullStage.FAILED, "it is no member any more"
            ), ()
        case OrderProgressed():
            return _record_progress(state, event.node, event.frame), ()
        case OrderEnded():
            return _end_order(state, event.node, event.frame, now)
        case PullCancelled():
            return _cancel(state)
        case TimePassed():
            return _expire(state, now)


def _change(state: PullState, name: NodeId, **changes: Any) -> PullState:
    return replace(state, nodes={**state.nodes, name: replace(state.nodes[name], **changes)})


def _end(state: PullState, name: NodeId, stage: PullStage, message: str = "") -> PullState:
    """End the pull on a node, unless it has ended there."""
    if state.nodes[name].stage in ENDED:
        return state
    return _change(state, name, stage=stage, message=message, phase="", speed=0.0)


def _record_link(state: PullState, name: NodeId) -> Step:
    node, linked = state.nodes[name], _change(state, name, is_linked=True)
    linked = _drop_mirror_of(linked, name)
    if not is_pulling(node):
        return linked, ()
    # The node attaches the order to the download in progress, or resumes it. A mirror may have ended meanwhile.
    return _change(linked, name, stage=PullStage.WAITING, retry_at=0.0), ()


def _drop_mirror_of(state: PullState, name: NodeId) -> PullState:
    return replace(state, mirror=None) if state.mirror is not None and state.mirror.node == name else state


def _record_unlink(state: PullState, name: NodeId, now: float) -> Step:
    return _drop_mirror_of(_change(state, name, is_linked=False, unlinked_at=now), name), ()


def _record_progress(state: PullState, name: NodeId, frame: ModelOrderProgress) -> PullState:
    node, mirror = state.nodes[name], state.mirror
    if mirror is not None and (mirror.node, mirror.order) == (name, frame.order):
        return replace(state, mirror=replace(mirror, addresses=frame.addresses or mirror.addresses))
    if frame.order != node.order or not is_pulling(node):
        return state
    return _change(
        state,
        name,
        phase=frame.phase,
        done=frame.done,
        total=frame.total,
        speed=frame.speed,
        fetched=node.earlier + frame.fetched,
        retries=0 if frame.fetched else node.retries,
        message=frame.message,
        source=SourceKind.MIRROR if frame.from_mirror else node.source,
    )


def _end_order(state: PullState, name: NodeId, frame: ModelOrderEnded, now: float) -> Step:
    node, mirror = state.nodes[name], state.mirror
    if mirror is not None and (mirror.node, mirror.order) == (name, frame.order):
        return replace(
            state, mirror=None, no_mirror=state.no_mirror | ({name} if _has_failed(mirror, frame) else set())
        ), ()
    if frame.order != node.order or not is_pulling(node):
        return state, ()
    fetched = max(node.fetched, node.earlier + frame.fetched)
    state = _change(state, name, code=str(frame.code), fetched=fetched, speed=0.0)
    match frame.code:
        case ModelOrderCode.COMPLETED:
            size = max(node.total, node.done)
            return _change(_end(state, name, PullStage.COMPLETED), name, done=size, total=size), ()
        case ModelOrderCode.CANCELLED:  # by another pull of the same files, or by a signal
            interrupted = replace_frame(frame, code=ModelOrderCode.INTERRUPTED, message="cancelled on the node")
            return _retry(state, name, interrupted, now), ()
        case code if code in _FATAL and node.source is SourceKind.HUB:
            return _fail_all(state, frame.message), ()
        case _:
            return _retry(state, name, frame, now), ()


def _has_failed(mirror: Mirror, frame: ModelOrderEnded) -> bool:
    """Return whether the end of a mirror shows that its node cannot serve.

    A mirror that was interrupted after it had listened can serve again.
    """
    if frame.code == ModelOrderCode.INTERRUPTED:
        return not mirror.addresses
    return frame.code not in (ModelOrderCode.COMPLETED, ModelOrderCode.CANCELLED)


def _fail_all(state: PullState, message: str) -> PullState:
    for name, node in state.nodes.items():
        if node.stage is PullStage.WAITING or is_downloading(node):
            state = _end(state, name, PullStage.FAILED, message)
    return state


def _retry(state: PullState, name: NodeId, frame: ModelOrderEnded, now: float) -> PullState:
    """Postpone the next order of a node after a fault, or end the pull there if a retry is useless."""
    node = state.nodes[name]
    from_mirror = node.source is SourceKind.MIRROR
    wait = frame.retry_after or FIRST_RETRY_SECONDS * 2**node.retries
    if from_mirror and frame.code in _FATAL:  # a mirror that knows nothing of the pull is no fault of the repository
        frame = replace_frame(frame, code=ModelOrderCode.SOURCE_LOST)
    curable = {
        ModelOrderCode.SOURCE_LOST: True,
        ModelOrderCode.IN_USE: True,
        ModelOrderCode.INTERRUPTED: True,
        ModelOrderCode.RATE_LIMITED: wait <= MAX_RATE_LIMIT_SECONDS,
        ModelOrderCode.CONTENT_MISMATCH: from_mirror,
    }
    if node.retries >= MAX_RETRIES or not next((able for code, able in curable.items() if code == frame.code), False):
        return _end(state, name, PullStage.FAILED, frame.message)
    lost_often = state.mirror is not None and node.retries >= MAX_MIRROR_RETRIES
    rejects = from_mirror and (frame.code == ModelOrderCode.CONTENT_MISMATCH or lost_often)
    return _change(
        state,
        name,
        stage=PullStage.WAITING,
        retries=node.retries + 1,
        retry_at=now + wait,
        rejects_mirror=node.rejects_mirror or rejects,
        message=frame.message,
        phase="",
    )


def _cancel(state: PullState) -> Step:
    orders = [(name, node.order) for name, node in state.nodes.items() if is_pulling(node)]
    for name in state.nodes:
        state = _end(state, name, PullStage.CANCELLED)
    return state, tuple(SendCancel(name, order) for name, order in orders)


def _expire(state: PullState, now: float) -> Step:
    actions: list[Action] = []
    for name, node in state.nodes.items():
        if node.stage is PullStage.WAITING and node.retry_at <= now:
            state = _change(state, name, retry_at=0.0)
        if is_pulling(node) and not node.is_linked and now >= node.unlinked_at + UNLINKED_SECONDS:
            state = _change(state, name, stage=PullStage.WAITING, retry_at=0.0, phase="", speed=0.0)
    mirror = state.mirror
    if mirror is not None and not mirror.addresses and now >= mirror.begun + MIRROR_START_SECONDS:
        actions.append(SendCancel(mirror.node, mirror.order))
        state = replace(state, mirror=None, no_mirror=state.no_mirror | {mirror.node})
    return state, tuple(actions)


# plan


def _plan(state: PullState, now: float) -> Step:
    """Send the orders that the state needs: the download from the hub, the mirror, and the downloads from it."""
    if state.has_ended:
        if state.mirror is None:
            return state, ()
        return replace(state, mirror=None), (SendCancel(state.mirror.node, state.mirror.order),)
    state, closed = _close_empty_mirror(state)
    state, downloads = _plan_download(state, now)
    state, served = _plan_mirror(state, now)
    state, pulled = _plan_followers(state, now)
    return state, (*closed, *downloads, *served, *pulled)


def _close_empty_mirror(state: PullState) -> Step:
    """Close the mirror of a node whose own download has failed."""
    mirror = state.mirror
    if mirror is None or has_files(state.nodes[mirror.node]):
        return state, ()
    return replace(state, mirror=None), (SendCancel(mirror.node, mirror.order),)


def _list_due(state: PullState, now: float) -> list[NodeId]:
    return [
        name
        for name, node in state.nodes.items()
        if node.stage is PullStage.WAITING and node.is_linked and node.retry_at <= now
    ]


def _plan_download(state: PullState, now: float) -> Step:
    """Start the download from the hub on one node, if no node downloads and none can serve all files."""
    has_source = any(is_downloading(node) or _can_serve(state, name) for name, node in state.nodes.items())
    due = _list_due(state, now)
    if has_source or not due:
        return state, ()
    # The node with most of the files has least to download.
    return _send_pull(state, max(due, key=lambda name: state.nodes[name].done), SourceKind.HUB)


def _can_serve(state: PullState, name: NodeId) -> bool:
    node = state.nodes[name]
    return node.stage is PullStage.COMPLETED and node.is_linked and name not in state.no_mirror


def _plan_mirror(state: PullState, now: float) -> Step:
    wanting = [
        name
        for name, node in state.nodes.items()
        if node.stage is PullStage.WAITING and node.is_linked and not node.rejects_mirror
    ]
    if state.mirror is not None or not wanting:
        return state, ()
    able = [
        name for name, node in state.nodes.items() if node.is_linked and name not in state.no_mirror and has_files(node)
    ]
    if not able:
        return state, ()
    chosen = max(able, key=lambda name: (state.nodes[name].stage is PullStage.COMPLETED, state.nodes[name].done))
    order = state.next_order
    return replace(state, mirror=Mirror(chosen, order, now), next_order=order + 1), (SendServe(chosen, order),)


def _plan_followers(state: PullState, now: float) -> Step:
    """Send the waiting nodes to the mirror, or to the hub if no mirror can serve them."""
    actions: list[Action] = []
    for name in _list_due(state, now):
        node, mirror = state.nodes[name], state.mirror
        if mirror is not None and mirror.addresses and mirror.node != name and not node.rejects_mirror:
            state, sent = _send_pull(state, name, SourceKind.MIRROR, mirror)
            actions += sent
        elif node.rejects_mirror or _has_no_mirror(state):
            state, sent = _send_pull(state, name, SourceKind.HUB)
            actions += sent
    return state, tuple(actions)


def _has_no_mirror(state: PullState) -> bool:
    """Return whether no node with files can open a mirror."""
    holders = [name for name, node in state.nodes.items() if node.is_linked and has_files(node)]
    return state.mirror is None and bool(holders) and state.no_mirror.issuperset(holders)


def _send_pull(state: PullState, name: NodeId, source: SourceKind, mirror: Mirror | None = None) -> Step:
    order = state.next_order
    sent = _change(
        replace(state, next_order=order + 1),
        name,
        stage=PullStage.PULLING,
        order=order,
        source=source,
        phase="",
        message="",
        earlier=state.nodes[name].fetched,
    )
    return sent, (SendPull(name, order, source, mirror),)
