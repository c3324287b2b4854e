from typing import Any

import pytest
from msgspec.structs import replace

from coordinator.video.state.job_table import JobTable, LeaseHold
from coordinator.video.state.jobs import JobState
from coordinator.video.state.lease_placement import (
    LeaseChoice,
    NoLeaseChoice,
    choose_node,
    find_nearest_misfit,
    is_guard_off,
    list_video_models,
)
from coordinator.video.state.memory_model import FIRST_MEASURED_PROFILE, get_profile_key
from router.placement.cluster_view import MAX_REPORT_AGE_SECONDS, ClusterView, NodeView
from tests.support.cluster.loopback_cluster import a_memory
from tests.unit.coordinator.video.state.test_job_table import a_job
from wire.identity import NodeId
from wire.units import GIB
from wire.video import VideoPackage, VideoState

LEASE = 36 * GIB
WAN = VideoPackage("wan", engine="0.18.14", bits=8, expert=int(14.35 * GIB))


def a_node(name: str, room: int = 80 * GIB, cap: int = 128 * GIB, **changes: Any) -> NodeView:
    video = VideoState(True, "", f"ray-{name}", (changes.pop("package", WAN),))
    known: dict[str, Any] = {"state": "ready", "memory": a_memory(room, cap), "video": video, "video_allowed": True}
    return NodeView(NodeId(name), name, **(known | changes))


def a_board(**changes: Any) -> JobTable:
    job = a_job(1, size=LEASE)
    return JobTable(jobs={job.id: job}, **changes)


def chosen(*nodes: NodeView, board: JobTable | None = None, now: float = 0.0) -> str:
    found = choose_node(board or a_board(), ClusterView(nodes), {}, now)
    assert found is not None
    return found.node if isinstance(found, LeaseChoice) else found.phase


def test_choose_node_takes_the_node_with_most_headroom():
    assert chosen(a_node("a", 40 * GIB), a_node("b", 60 * GIB)) == "b"


def test_a_node_without_headroom_gets_the_request_only_when_no_node_has_headroom():
    """Only the node knows which idle models it would unload."""
    assert chosen(a_node("a", 10 * GIB), a_node("b", 36 * GIB)) == "b"
    assert chosen(a_node("a", 10 * GIB), a_node("b", 2 * GIB)) == "a"


def test_a_node_that_did_not_answer_does_not_count_as_one_that_makes_a_video():
    board = a_board(holds={"l": LeaseHold("l", "a", 1, "video_0", LEASE, 0.0)})
    found = choose_node(board, ClusterView((a_node("a"),)), {}, 0.0)
    assert isinstance(found, NoLeaseChoice)
    assert not found.busy


def test_a_node_that_makes_a_video_takes_no_second_one():
    board = a_board(holds={"l": LeaseHold("l", "a", 1, "video_0", LEASE, 0.0, granted=True)})
    assert chosen(a_node("a", 90 * GIB), a_node("b", 40 * GIB), board=board) == "b"
    found = choose_node(board, ClusterView((a_node("a"),)), {}, 0.0)
    assert isinstance(found, NoLeaseChoice)
    assert found.busy
    assert "makes another video" in found.phase


def test_choose_node_skips_a_refusing_node_until_its_retry_time():
    board = a_board(pauses={"a": 10.0})
    found = choose_node(board, ClusterView((a_node("a", reported_at=9.0),)), {}, 9.0)
    assert isinstance(found, NoLeaseChoice)
    assert not found.busy, "a refusing node has no headroom, and the time limit for headroom runs"
    assert chosen(a_node("a", reported_at=9.0), board=board, now=11.0) == "a"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"state": "lost"}, "it is lost"),
        ({"state": "paused"}, "it is paused: "),
        ({"reported_at": -10.0}, "silent"),
        ({"cordoned": True}, "cordoned"),
        ({"draining": True}, "drained"),
        ({"memory": a_memory(80 * GIB, 128 * GIB, guard=False)}, "guard is off"),
        ({"memory": a_memory(8 * GIB, 24 * GIB)}, "its cap leaves 22.0 GiB"),
        ({"video": VideoState(False, "no environment", "", (WAN,))}, "no environment"),
        ({"video": VideoState(False, "", "", (WAN,))}, "it cannot make videos now"),
        ({"video": VideoState(True, "", "", (WAN,), ray_cause="Ray is missing")}, "Ray is missing"),
        ({"video": VideoState(True, "", "", (WAN,))}, "Ray is starting"),
        ({"video_allowed": False}, "`cluster node allow-video a`"),
        ({"package": VideoPackage("wan", engine="0.38.0", bits=8, expert=26 * GIB)}, "its engine needs"),
    ],
)
def test_waiting_job_names_what_is_missing(changes: dict[str, Any], why: str):
    phase = chosen(a_node("a", **changes))
    assert phase.startswith("waiting: a: ")
    assert why in phase


def test_choose_node_takes_a_node_whose_report_is_as_old_as_it_may_be():
    assert chosen(a_node("a", reported_at=-MAX_REPORT_AGE_SECONDS)) == "a"


def test_choose_node_takes_a_node_with_unreadable_memory_last():
    unreadable = replace(a_memory(80 * GIB, 128 * GIB), phys=None)
    assert chosen(a_node("a", memory=unreadable), a_node("b")) == "b"


def test_choose_node_takes_no_node_for_another_package_or_one_that_cannot_be_used():
    packages = (replace(WAN, cause="a file is missing"), replace(WAN, name="other"))
    assert chosen(a_node("a", video=VideoState(True, "", "ray-a", packages))) == "waiting for a node that has wan"


def test_a_model_that_no_node_has_now_is_waited_for():
    assert "wan" in chosen(a_node("a", video=VideoState(True)))


def test_no_job_is_chosen_while_a_node_has_not_answered():
    asked = a_job(1, state=JobState.LEASING)
    assert choose_node(JobTable(jobs={"1": asked, "2": a_job(2)}), ClusterView((a_node("a"),)), {}, 0.0) is None
    assert choose_node(JobTable(), ClusterView(), {}, 0.0) is None


def test_a_job_that_no_known_node_could_take_is_known_at_once():
    small, large = a_node("small", 8 * GIB, 24 * GIB), a_node("large", 8 * GIB, state="asleep")
    assert find_nearest_misfit(ClusterView((small, large)), "wan", 336, LEASE, {}) is None, "it may wake up"
    found = find_nearest_misfit(ClusterView((small,)), "wan", 336, LEASE, {})
    assert found is not None
    assert "small: its cap leaves 22.0 GiB" in found[1]
    tiny = a_node("tiny", GIB, 8 * GIB, package=replace(WAN, expert=GIB))
    for nodes in ((tiny, small), (small, tiny)):
        found = find_nearest_misfit(ClusterView(nodes), "wan", 336, LEASE, {})
        assert found is not None
        assert found[0] == WAN, "the node that lacks the least names the package"
        assert found[1].startswith("small: ")
    found = find_nearest_misfit(ClusterView((large,)), "wan", 7168, LEASE, {})
    assert found is not None
    assert "44.3 GiB" in found[1]
    raised = {get_profile_key(WAN): FIRST_MEASURED_PROFILE.add_measurement(336, 35 * GIB)}
    assert find_nearest_misfit(ClusterView((large,)), "wan", 336, LEASE, raised) is not None


def test_models_are_those_that_can_be_used_somewhere():
    broken = VideoPackage("broken", cause="a shard is missing")
    view = ClusterView((a_node("a"), a_node("b", package=broken)))
    assert set(list_video_models(view)) == {"wan"}
    assert is_guard_off(view.nodes) is False
    assert is_guard_off([a_node("a", memory=a_memory(guard=False))]) is True
    assert is_guard_off([a_node("a", memory=a_memory(guard=False)), a_node("b")]) is False
    assert is_guard_off([]) is False


def test_choose_node_respects_the_labels_of_the_key():
    job = a_job(1, size=LEASE)
    job = replace(job, wanted=replace(job.wanted, labels=("lab",)))
    board = JobTable(jobs={job.id: job})
    here, there = a_node("a", 90 * GIB), a_node("b", 40 * GIB, labels=frozenset({"lab"}))
    assert chosen(here, there, board=board) == "b"
    assert "the labels lab" in chosen(here, board=board)


def test_of_different_packages_under_one_name_one_is_used():
    one, other = (replace(WAN, fingerprint=name, steps=steps) for name, steps in (("one", 40), ("other", 8)))
    nodes = (
        a_node("a", 90 * GIB, package=other),
        a_node("b", 10 * GIB, package=one),
        a_node("c", 20 * GIB, package=one),
        a_node("d", 99 * GIB, state="lost", package=other),
    )
    assert chosen(*nodes[:3]) == "c", "most nodes have it"
    assert chosen(*nodes[:2], a_node("e", 20 * GIB, package=other)) == "a"
    assert (chosen(*nodes), list_video_models(ClusterView(nodes))["wan"]) == ("c", one), "of equals the first by hash"
    fewer = (nodes[0], *(a_node(name, state="lost", package=one) for name in "bc"))
    assert (chosen(*fewer), list_video_models(ClusterView(fewer))["wan"]) == ("a", other), "a ready node has it"
    busy = a_board(holds={key: LeaseHold(key, key, 1, "video_0", LEASE, 0.0, granted=True) for key in "bc"})
    assert chosen(*nodes, board=busy).endswith("; other files under the name wan on a, d are not used")
    paused = a_board(pauses=dict.fromkeys("bc", 10.0))
    assert chosen(*nodes, board=paused) == a_job(1, size=LEASE).phase, "the refusal of the node stays the reason"
