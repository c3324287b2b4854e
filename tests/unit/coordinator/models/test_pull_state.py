"""State machine of a pull: sources of the files, and the effects of nodes and sources that fail."""

from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.models.pull_state import (
    FIRST_RETRY_SECONDS,
    MAX_RETRIES,
    MIRROR_START_SECONDS,
    UNLINKED_SECONDS,
    find_deadline,
    restore_pull,
    step,
)
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
    has_files,
    list_unfailed,
)
from wire.frames import ModelOrderCode, ModelOrderEnded, ModelOrderPhase, ModelOrderProgress
from wire.identity import NodeId
from wire.models.files import SourceKind
from wire.state_machine import IllegalEventError, InvariantError

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


class Pull:
    """A pull under test: applies events, and keeps the actions."""

    def __init__(self, *nodes: NodeId, linked: bool = True) -> None:
        self.state = PullState({name: NodePull() for name in nodes}, 1)
        self.now = 100.0
        self.sent: list[Action] = []
        for name in nodes if linked else ():
            self.apply(NodeLinked(name))

    def apply(self, event: Event) -> list[Action]:
        self.state, actions = step(self.state, event, self.now)
        self.sent += actions
        return [action for action in actions if not isinstance(action, StorePull)]

    def progress(self, name: NodeId, **fields: object) -> list[Action]:
        order = self.state.nodes[name].order
        frame = ModelOrderProgress(order, **{"phase": ModelOrderPhase.DOWNLOADING, **fields})  # pyright: ignore[reportArgumentType]
        return self.apply(OrderProgressed(name, frame))

    def open_mirror(self) -> list[Action]:
        mirror = self.state.mirror
        assert mirror is not None
        frame = ModelOrderProgress(mirror.order, ModelOrderPhase.SERVING, addresses=("https://10.0.0.1:9000",))
        return self.apply(OrderProgressed(mirror.node, frame))

    def end(self, name: NodeId, code: ModelOrderCode = ModelOrderCode.COMPLETED, **fields: object) -> list[Action]:
        frame = ModelOrderEnded(self.state.nodes[name].order, code, **fields)  # pyright: ignore[reportArgumentType]
        return self.apply(OrderEnded(name, frame))

    def stages(self) -> list[PullStage]:
        return [node.stage for node in self.state.nodes.values()]


def follow(pull: Pull) -> None:
    """Bring a pull to the state in which all nodes but the first follow its mirror."""
    pull.progress(next(iter(pull.state.nodes)), done=5, total=10, fetched=5)
    pull.open_mirror()


def test_one_node_downloads_and_the_others_follow_its_mirror_while_it_downloads() -> None:
    pull = Pull(A, B, C)
    assert [one for one in pull.sent if not isinstance(one, StorePull)] == [SendPull(A, 1, SourceKind.HUB)]
    assert pull.progress(A, phase=ModelOrderPhase.CHECKING) == []
    assert pull.progress(A, done=5, total=10, fetched=5) == [SendServe(A, 2)]
    mirror = pull.open_mirror()
    assert [(one.node, one.source) for one in mirror if isinstance(one, SendPull)] == [
        (B, SourceKind.MIRROR),
        (C, SourceKind.MIRROR),
    ]
    assert pull.end(A, fetched=10) == []
    assert pull.end(B, fetched=10) == []
    assert pull.end(C, fetched=10) == [SendCancel(A, 2)], "the mirror ends with the last node"
    assert pull.state.has_ended
    assert pull.state.nodes[A].done == pull.state.nodes[A].total == 10


def test_one_node_needs_no_mirror() -> None:
    pull = Pull(A)
    assert pull.progress(A, done=5) == []
    assert pull.end(A) == []
    assert pull.stages() == [PullStage.COMPLETED]


def test_a_node_that_has_the_files_serves_them() -> None:
    pull = Pull(A, B)
    assert pull.end(A) == [SendServe(A, 2)]
    assert [type(one) for one in pull.open_mirror()] == [SendPull]


def test_a_node_that_links_later_follows_too() -> None:
    pull = Pull(A, B, linked=False)
    assert pull.apply(NodeLinked(B)) == [SendPull(B, 1, SourceKind.HUB)]
    pull.progress(B, done=1)
    assert pull.apply(NodeLinked(A)) == [SendServe(B, 2)]


def test_the_node_with_most_of_the_files_replaces_a_lost_downloading_node() -> None:
    pull = Pull(A, B, C)
    follow(pull)
    pull.progress(B, done=1, fetched=1)
    pull.progress(C, done=4, fetched=4)
    assert pull.apply(NodeUnlinked(A)) == []
    assert pull.end(B, ModelOrderCode.SOURCE_LOST, message="the mirror is gone") == []
    assert pull.end(C, ModelOrderCode.SOURCE_LOST, message="the mirror is gone") == []
    assert find_deadline(pull.state) == pull.now + 2.0
    pull.now += 2.0
    pull.apply(TimePassed())
    assert find_deadline(pull.state) == pull.now - 2.0 + UNLINKED_SECONDS == pull.now + 58.0, "a deadline is due once"
    pull.now += UNLINKED_SECONDS
    sent = pull.apply(TimePassed())
    assert [(one.node, one.source) for one in sent if isinstance(one, SendPull)] == [(C, SourceKind.HUB)]
    pull.progress(C, done=5, fetched=1)
    assert [(one.node) for one in pull.open_mirror() if isinstance(one, SendPull)] == [B]
    assert pull.state.nodes[C].fetched == 5, "bytes of both orders"


def test_a_node_that_links_again_attaches_to_its_download() -> None:
    pull = Pull(A)
    pull.progress(A, done=5, fetched=5)
    pull.apply(NodeUnlinked(A))
    assert pull.apply(NodeLinked(A)) == [SendPull(A, 2, SourceKind.HUB)]
    assert pull.apply(OrderEnded(A, ModelOrderEnded(1, ModelOrderCode.FAILED))) == [], "the former order"
    assert pull.stages() == [PullStage.PULLING]


@pytest.mark.parametrize("code", [ModelOrderCode.GATED, ModelOrderCode.NOT_FOUND, ModelOrderCode.INVALID])
def test_a_fault_of_the_repository_ends_the_pull_everywhere(code: ModelOrderCode) -> None:
    pull = Pull(A, B)
    pull.end(A, code, message="accept its terms")
    assert pull.stages() == [PullStage.FAILED, PullStage.FAILED]
    assert {node.message for node in pull.state.nodes.values()} == {"accept its terms"}


@pytest.mark.parametrize("code", [ModelOrderCode.GATED, ModelOrderCode.NOT_FOUND, ModelOrderCode.INVALID])
def test_a_mirror_that_refuses_a_node_is_no_fault_of_the_repository(code: ModelOrderCode) -> None:
    pull = Pull(A, B, C)
    follow(pull)
    pull.end(B, code, message="the mirror does not know the token")
    assert pull.stages() == [PullStage.PULLING, PullStage.WAITING, PullStage.PULLING]


def test_a_full_disk_ends_the_pull_on_that_node_only() -> None:
    pull = Pull(A, B, C)
    follow(pull)
    sent = pull.end(A, ModelOrderCode.DISK_FULL, message="3 GiB are free, 9 GiB are needed")
    assert SendCancel(A, 2) in sent, "a mirror without a download behind it"
    assert pull.stages() == [PullStage.FAILED, PullStage.PULLING, PullStage.PULLING]
    pull.end(B, ModelOrderCode.SOURCE_LOST)
    pull.now += 5
    assert SendPull(B, 5, SourceKind.HUB) in pull.apply(TimePassed())


def test_a_rate_limit_is_waited_for_and_a_long_one_is_a_failure() -> None:
    pull = Pull(A)
    pull.end(A, ModelOrderCode.RATE_LIMITED, message="300 requests in 5 minutes", retry_after=120.0)
    assert find_deadline(pull.state) == pull.now + 120
    assert pull.apply(TimePassed()) == []
    pull.now += 120
    assert pull.apply(TimePassed()) == [SendPull(A, 2, SourceKind.HUB)]
    pull.end(A, ModelOrderCode.RATE_LIMITED, message="come back in an hour", retry_after=3600.0)
    assert pull.stages() == [PullStage.WAITING]
    pull.now += 3600
    pull.apply(TimePassed())
    pull.end(A, ModelOrderCode.RATE_LIMITED, message="come back tomorrow", retry_after=3601.0)
    assert pull.stages() == [PullStage.FAILED]


def test_a_hub_that_cannot_be_reached_is_retried_a_bounded_number_of_times() -> None:
    pull = Pull(A)
    waits: list[float] = []
    while pull.stages() != [PullStage.FAILED]:
        pull.progress(A, phase=ModelOrderPhase.CHECKING, done=5, total=10)  # without new bytes, no progress of a retry
        pull.end(A, ModelOrderCode.SOURCE_LOST, message="the hub does not answer")
        deadline = find_deadline(pull.state)
        if deadline is not None:
            waits.append(deadline - pull.now)
            pull.now = deadline
            pull.apply(TimePassed())
    assert waits == [2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0]
    assert pull.state.nodes[A].message == "the hub does not answer"


def test_a_hub_that_fails_again_after_progress_is_retried_soon_and_without_end() -> None:
    pull = Pull(A)
    for number in range(1, 3 * MAX_RETRIES):
        pull.progress(A, done=number, total=100, fetched=1)
        pull.end(A, ModelOrderCode.SOURCE_LOST, message="the hub closed the connection", fetched=1)
        assert find_deadline(pull.state) == pull.now + FIRST_RETRY_SECONDS
        pull.now += FIRST_RETRY_SECONDS
        pull.apply(TimePassed())
    assert pull.stages() == [PullStage.PULLING]


def test_content_that_differs_is_fetched_from_the_hub_and_from_there_is_a_failure() -> None:
    pull = Pull(A, B)
    follow(pull)
    pull.end(B, ModelOrderCode.CONTENT_MISMATCH, message="model.safetensors differs")
    pull.now += 5
    assert [(one.node, one.source) for one in pull.apply(TimePassed()) if isinstance(one, SendPull)] == [
        (B, SourceKind.HUB)
    ]
    pull.end(B, ModelOrderCode.CONTENT_MISMATCH, message="model.safetensors differs")
    assert pull.stages() == [PullStage.PULLING, PullStage.FAILED]


def test_without_a_mirror_every_node_uses_the_hub() -> None:
    pull = Pull(A, B)
    pull.progress(A, done=1)
    assert find_deadline(pull.state) == pull.now + MIRROR_START_SECONDS == pull.now + 20
    pull.now += MIRROR_START_SECONDS
    assert pull.apply(TimePassed()) == [SendCancel(A, 2), SendPull(B, 3, SourceKind.HUB)]


def test_a_mirror_that_cannot_be_reached_is_given_up_after_some_tries() -> None:
    pull = Pull(A, B)
    follow(pull)
    sources: list[SourceKind] = []
    while not sources or sources[-1] is SourceKind.MIRROR:
        pull.end(B, ModelOrderCode.SOURCE_LOST, message="no route to host")
        pull.now += 60
        sources += [one.source for one in pull.apply(TimePassed()) if isinstance(one, SendPull)]
    assert sources == [SourceKind.MIRROR, SourceKind.MIRROR, SourceKind.HUB]


def test_a_node_that_got_damaged_files_from_a_mirror_never_uses_it_again() -> None:
    pull = Pull(A, B)
    follow(pull)
    assert pull.end(B, ModelOrderCode.CONTENT_MISMATCH, message="another digest") == []
    sources: list[SourceKind] = []
    for _ in range(3):
        pull.now += 60
        sources += [one.source for one in pull.apply(TimePassed()) if isinstance(one, SendPull)]
        pull.end(B, ModelOrderCode.SOURCE_LOST, message="the hub is away")
    assert sources == [SourceKind.HUB] * 3
    assert pull.state.mirror is not None, "it is open meanwhile"


def test_an_interrupted_download_continues_on_its_node() -> None:
    pull = Pull(A, B)
    follow(pull)
    assert SendCancel(A, 2) in pull.end(A, ModelOrderCode.INTERRUPTED, message="ended by SIGKILL")
    pull.now += 2.0
    assert pull.apply(TimePassed()) == [SendPull(A, 4, SourceKind.HUB)]


def test_a_download_that_another_pull_cancels_continues() -> None:
    pull = Pull(A)
    pull.progress(A, done=5, total=10, fetched=5)
    assert pull.end(A, ModelOrderCode.CANCELLED) == []
    assert (pull.stages(), pull.state.nodes[A].message) == ([PullStage.WAITING], "cancelled on the node")
    pull.now += FIRST_RETRY_SECONDS
    assert pull.apply(TimePassed()) == [SendPull(A, 2, SourceKind.HUB)]


def end_mirror(pull: Pull, code: ModelOrderCode) -> list[Action]:
    mirror = pull.state.mirror
    assert mirror is not None
    return pull.apply(OrderEnded(mirror.node, ModelOrderEnded(mirror.order, code)))


def test_an_interrupted_mirror_is_opened_again_unless_it_never_listened() -> None:
    pull = Pull(A, B)
    follow(pull)
    assert end_mirror(pull, ModelOrderCode.INTERRUPTED) == []
    assert pull.end(B, ModelOrderCode.SOURCE_LOST, message="the mirror has ended") == [SendServe(A, 4)]
    assert end_mirror(pull, ModelOrderCode.INTERRUPTED) == []
    pull.now += 2.0
    assert pull.apply(TimePassed()) == [SendPull(B, 5, SourceKind.HUB)]


def test_cancel_ends_every_order_and_the_mirror() -> None:
    pull = Pull(A, B, C, linked=False)
    pull.apply(NodeLinked(A))
    pull.apply(NodeLinked(B))
    follow(pull)
    pull.progress(A, done=5, total=10, fetched=5, speed=3.0)
    assert pull.apply(PullCancelled()) == [SendCancel(A, 1), SendCancel(B, 3), SendCancel(A, 2)]
    assert pull.stages() == [PullStage.CANCELLED] * 3
    assert [(node.phase, node.speed) for node in pull.state.nodes.values()] == [("", 0.0)] * 3
    assert pull.apply(NodeLinked(C)) == []


def test_a_removed_node_ends_and_an_unknown_one_is_illegal() -> None:
    pull = Pull(A, B)
    follow(pull)
    pull.apply(PullNodeRemoved(A))
    assert pull.stages() == [PullStage.FAILED, PullStage.PULLING]
    served = Pull(A, B)
    served.end(A)
    served.open_mirror()
    served.apply(PullNodeRemoved(A))
    assert (served.stages(), served.state.mirror) == ([PullStage.COMPLETED, PullStage.PULLING], None)
    with pytest.raises(IllegalEventError, match="does not belong"):
        pull.apply(NodeLinked(NodeId("z")))


def test_restore_continues_where_the_pull_was() -> None:
    pull = Pull(A, B)
    follow(pull)
    pull.end(A, fetched=10)
    state = restore_pull(pull.state, 1000)
    assert state.mirror is None
    pull.state = state
    assert pull.apply(NodeLinked(B)) == [SendPull(B, 1000, SourceKind.HUB)], "the node with all files is not linked yet"
    pull.state = state
    assert pull.apply(NodeLinked(A)) == []
    assert pull.apply(NodeLinked(B)) == [SendServe(A, 1000)]


def test_restore_forgets_waits_because_the_clock_of_the_controller_is_another_one() -> None:
    pull = Pull(A)
    pull.end(A, ModelOrderCode.SOURCE_LOST, retry_after=600.0)
    pull.state, pull.now = restore_pull(pull.state, 1000), 1.0
    assert pull.apply(NodeLinked(A)) == [SendPull(A, 1000, SourceKind.HUB)]


def test_a_mirror_keeps_its_addresses_when_it_reports_without_them() -> None:
    pull = Pull(A, B)
    follow(pull)
    mirror = pull.state.mirror
    assert mirror is not None
    pull.apply(OrderProgressed(A, ModelOrderProgress(mirror.order, ModelOrderPhase.SERVING)))
    assert pull.state.mirror == mirror


def test_a_change_of_stage_or_message_is_stored_and_progress_is_not() -> None:
    pull = Pull(A, B)
    assert sum(isinstance(action, StorePull) for action in pull.sent) == 1, "the order of the first node"
    stored: list[bool] = []
    for act in (
        lambda: pull.progress(A, done=5, total=10, fetched=5),
        lambda: pull.progress(A, done=6, total=10, fetched=6, message="the hub is slow"),
        lambda: pull.progress(A, done=7, total=10, fetched=7, message="the hub is slow"),
        lambda: pull.end(A, fetched=10),
    ):
        pull.sent.clear()
        act()
        stored.append(any(isinstance(action, StorePull) for action in pull.sent))
    assert stored == [False, True, False, True]


def test_a_node_that_ended_keeps_its_stage_when_it_is_removed() -> None:
    pull = Pull(A, B)
    pull.end(A)
    assert pull.apply(PullNodeRemoved(A)) == [SendPull(B, 3, SourceKind.HUB)], "without the mirror"
    assert pull.stages() == [PullStage.COMPLETED, PullStage.PULLING]


def test_a_mirror_whose_node_links_again_is_opened_anew() -> None:
    pull = Pull(A, B)
    pull.end(A)
    pull.open_mirror()
    assert pull.apply(NodeLinked(A)) == [], "B has an order, which ends without the mirror"
    assert pull.state.mirror is None
    assert pull.end(B, ModelOrderCode.SOURCE_LOST) == [SendServe(A, 4)]


def test_a_mirror_stays_open_when_another_node_comes_or_goes() -> None:
    pull = Pull(A, B, C)
    follow(pull)
    mirror = pull.state.mirror
    assert pull.apply(NodeUnlinked(B)) == []
    assert pull.apply(NodeLinked(B)) == [SendPull(B, 5, SourceKind.MIRROR, mirror)]
    assert pull.apply(PullNodeRemoved(C)) == []
    assert pull.state.mirror == mirror


def test_a_mirror_that_fails_is_not_opened_again() -> None:
    pull = Pull(A, B)
    follow(pull)
    end_mirror(pull, ModelOrderCode.FAILED)
    assert pull.end(B, ModelOrderCode.SOURCE_LOST) == []
    pull.now += 2.0
    assert pull.apply(TimePassed()) == [SendPull(B, 4, SourceKind.HUB)]


def test_a_mirror_that_was_cancelled_is_opened_again_unless_its_files_are_rejected() -> None:
    pull = Pull(A, B)
    follow(pull)
    end_mirror(pull, ModelOrderCode.CANCELLED)
    assert pull.end(B, ModelOrderCode.SOURCE_LOST) == [SendServe(A, 4)]
    rejecting = Pull(A, B)
    follow(rejecting)
    rejecting.end(B, ModelOrderCode.CONTENT_MISMATCH)
    assert end_mirror(rejecting, ModelOrderCode.CANCELLED) == []
    assert rejecting.state.mirror is None


def test_files_that_are_in_use_are_tried_again_and_the_message_ends_with_the_wait() -> None:
    pull = Pull(A)
    pull.end(A, ModelOrderCode.IN_USE, message="another process writes them")
    assert (pull.stages(), pull.state.nodes[A].message) == ([PullStage.WAITING], "another process writes them")
    pull.now += FIRST_RETRY_SECONDS
    assert pull.apply(TimePassed()) == [SendPull(A, 2, SourceKind.HUB)]
    assert pull.state.nodes[A].message == ""


def test_cancel_sends_nothing_to_nodes_without_an_open_order() -> None:
    pull = Pull(A, B, C)
    follow(pull)
    pull.end(B)
    pull.end(C, ModelOrderCode.SOURCE_LOST)
    assert pull.apply(PullCancelled()) == [SendCancel(A, 1), SendCancel(A, 2)]
    assert pull.stages() == [PullStage.CANCELLED, PullStage.COMPLETED, PullStage.CANCELLED]


def test_another_completed_node_replaces_a_mirror_in_the_same_step() -> None:
    pull = Pull(A, B, C)
    pull.end(A)
    pull.open_mirror()
    pull.end(B)
    pull.apply(NodeUnlinked(C))
    pull.apply(NodeLinked(C))
    before = pull.state.mirror
    assert before is not None
    pull.end(C, ModelOrderCode.SOURCE_LOST)
    assert pull.apply(NodeUnlinked(A)) == [SendServe(B, before.order + 4)]
    assert pull.state.mirror is not None
    assert pull.state.mirror.node == B


def test_a_node_without_a_link_is_not_due_until_it_returns() -> None:
    pull = Pull(A)
    pull.end(A, ModelOrderCode.SOURCE_LOST)
    assert pull.apply(NodeUnlinked(A)) == []
    assert find_deadline(pull.state) is None
    pull.now += 5.0
    assert pull.apply(NodeLinked(A)) == [SendPull(A, 2, SourceKind.HUB)]


def test_a_completed_mirror_is_opened_again_for_a_node_that_needs_it() -> None:
    pull = Pull(A, B)
    pull.end(A)
    pull.open_mirror()
    end_mirror(pull, ModelOrderCode.COMPLETED)
    assert pull.end(B, ModelOrderCode.SOURCE_LOST) == [SendServe(A, 4)]


def test_frames_about_a_former_order_change_nothing() -> None:
    pull = Pull(A)
    pull.progress(A, done=5, total=10, fetched=5)
    pull.apply(NodeLinked(A))
    before = pull.state
    for frame in (ModelOrderProgress(1, ModelOrderPhase.DOWNLOADING, 9, 10), ModelOrderProgress(3, "verifying", 9, 10)):
        pull.apply(OrderProgressed(A, frame))
    assert pull.state == before


def test_fetched_is_the_sum_of_all_orders() -> None:
    pull = Pull(A)
    pull.end(A, ModelOrderCode.SOURCE_LOST, fetched=5)
    pull.now += FIRST_RETRY_SECONDS
    pull.apply(TimePassed())
    pull.progress(A, done=8, total=10, fetched=3)
    assert pull.state.nodes[A].fetched == 8
    pull.end(A, fetched=4)
    assert pull.state.nodes[A].fetched == 9


def test_the_end_of_an_order_stops_the_clock_of_its_node() -> None:
    pull = Pull(A)
    pull.progress(A, done=5, total=10, fetched=5, speed=3.0)
    assert pull.state.nodes[A].speed == 3.0
    pull.end(A, ModelOrderCode.SOURCE_LOST)
    assert (pull.state.nodes[A].speed, pull.state.nodes[A].phase) == (0.0, "")


@pytest.mark.parametrize(
    ("state", "fault"),
    [
        ({"nodes": {A: NodePull(stage=PullStage.PULLING)}}, "pulling without an order"),
        ({"nodes": {A: NodePull(order=7), B: NodePull(order=7)}}, "an order number twice"),
        ({"nodes": {A: NodePull(order=10)}}, "an order number from the future"),
        ({"nodes": {A: NodePull(order=7)}, "mirror": Mirror(A, 8, 0.0)}, "a mirror without files"),
        ({"nodes": {A: NodePull(stage=PullStage.COMPLETED)}, "mirror": Mirror(A, 8, 0.0)}, "a mirror after the end"),
        (
            {"nodes": {name: NodePull(stage=PullStage.PULLING, order=at) for at, name in enumerate((A, B), 1)}},
            "two nodes download from the hub although a mirror is possible",
        ),
    ],
)
def test_check_names_each_contradiction(state: dict[str, Any], fault: str) -> None:
    with pytest.raises(InvariantError, match=fault):
        PullState(next_order=10, **state).check()


@dataclass
class World:
    """Nodes that perform orders, with faults drawn at random until `calm`."""

    random: Random
    pull: Pull
    pulls: dict[NodeId, SendPull] = field(default_factory=dict[NodeId, SendPull])
    serves: dict[NodeId, int] = field(default_factory=dict[NodeId, int])

    @property
    def is_open(self) -> bool:
        """Whether the mirror of the pull listens."""
        return self.pull.state.mirror is not None and bool(self.pull.state.mirror.addresses)

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case SendPull():
                    assert self.pull.state.nodes[action.node].is_linked
                    assert action.source is SourceKind.HUB or action.mirror is not None
                    self.pulls[action.node] = action
                case SendServe():
                    self.serves[action.node] = action.order
                case SendCancel():
                    if self.serves.get(action.node) == action.order:
                        del self.serves[action.node]
                case StorePull():
                    pass

    def apply(self, event: Event) -> None:
        self.perform(self.pull.apply(event))

    def act(self, name: NodeId, *, calm: bool) -> None:
        """Perform one thing on one node: lose or get its link, open a mirror, progress, fail or complete."""
        node, draw = self.pull.state.nodes[name], self.random.random
        if not node.is_linked:
            self.apply(NodeLinked(name))
        elif not calm and draw() < 0.1:
            self.serves.pop(name, None)
            self.apply(NodeUnlinked(name))
        elif name in self.serves and not self.is_open and (calm or draw() < 0.5):
            order = self.serves[name]
            if not calm and draw() < 0.2:
                del self.serves[name]
                self.apply(OrderEnded(name, ModelOrderEnded(order, ModelOrderCode.FAILED)))
            else:
                frame = ModelOrderProgress(order, ModelOrderPhase.SERVING, addresses=("https://x:1",))
                self.apply(OrderProgressed(name, frame))
        elif node.stage is PullStage.PULLING and name in self.pulls:
            self.work(name, self.pulls[name].order, calm=calm)

    def work(self, name: NodeId, order: int, *, calm: bool) -> None:
        node, draw = self.pull.state.nodes[name], self.random.random
        if not calm and draw() < 0.2:
            codes = [ModelOrderCode.SOURCE_LOST, ModelOrderCode.IN_USE, ModelOrderCode.CONTENT_MISMATCH]
            self.apply(OrderEnded(name, ModelOrderEnded(order, self.random.choice(codes), "a fault")))
        elif node.done >= 3:
            self.apply(OrderEnded(name, ModelOrderEnded(order, ModelOrderCode.COMPLETED)))
        else:
            frame = ModelOrderProgress(order, ModelOrderPhase.DOWNLOADING, done=node.done + 1, total=3, fetched=1)
            self.apply(OrderProgressed(name, frame))


@given(st.randoms(use_true_random=False), st.integers(1, 5), st.integers(0, 60))
def test_every_order_of_events_keeps_the_invariants_and_ends(random: Random, count: int, faults: int) -> None:
    names = [NodeId(f"n{at}") for at in range(count)]
    pull = Pull(*names, linked=False)
    world = World(random, pull)
    for turn in range(faults + 400):
        if pull.state.has_ended:
            break
        deadline = find_deadline(pull.state)
        if deadline is not None and (turn % 3 == 0 or random.random() < 0.3):
            pull.now = max(pull.now, deadline)
            world.apply(TimePassed())
        else:
            world.act(names[turn % count], calm=turn >= faults)
    assert pull.state.has_ended, pull.state
    assert pull.state.mirror is None
    assert world.serves == {} or not set(world.serves) & {name for name in names if pull.state.nodes[name].is_linked}
    orders = [action.order for action in pull.sent if isinstance(action, SendPull | SendServe)]
    assert len(orders) == len(set(orders))
    assert all(node.stage in ENDED for node in pull.state.nodes.values())


def test_a_download_of_a_node_that_stays_away_waits_without_phase_and_speed() -> None:
    pull = Pull(A, B)
    pull.progress(A, done=5, total=10, fetched=5, speed=3.0)
    assert (pull.state.nodes[A].phase, pull.state.nodes[A].speed) == (ModelOrderPhase.DOWNLOADING, 3.0)
    pull.apply(NodeUnlinked(A))
    pull.now += UNLINKED_SECONDS
    pull.apply(TimePassed())
    away = pull.state.nodes[A]
    assert (away.stage, away.phase, away.speed, away.done) == (PullStage.WAITING, "", 0.0, 5)


def test_only_a_node_with_files_from_the_hub_can_serve_them():
    sources, phases = (SourceKind.HUB, SourceKind.MIRROR), ("", *ModelOrderPhase)
    serving = {
        (stage, source, phase)
        for stage in PullStage
        for source in sources
        for phase in phases
        if has_files(NodePull(stage=stage, source=source, phase=phase))
    }
    completed = {(PullStage.COMPLETED, source, phase) for source in sources for phase in phases}
    assert serving - completed == {
        (PullStage.PULLING, SourceKind.HUB, phase) for phase in (ModelOrderPhase.DOWNLOADING, ModelOrderPhase.VERIFYING)
    }
    assert completed <= serving


def test_a_pull_on_a_node_has_failed_only_in_the_stage_failed():
    nodes = {NodeId(stage): NodePull(stage=stage) for stage in PullStage}
    assert list_unfailed(PullState(nodes, 1)) == frozenset(nodes) - {PullStage.FAILED}
