import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.cluster.member_state import (
    TABLE,
    CloseLink,
    DeleteMember,
    Event,
    Member,
    MemberConnected,
    MemberCordoned,
    MemberDisconnected,
    MemberEnrolled,
    MemberGoodbye,
    MemberRemoved,
    MemberReported,
    MembershipTick,
    MemberUncordoned,
    PublishMember,
    ResumeRequests,
)
from coordinator.cluster.member_transitions import DELETE_AFTER_SECONDS, step
from coordinator.cluster.membership import Membership, advance, next_deadline, restore_membership, tick
from wire.identity import NodeId
from wire.node_state import NodeState
from wire.state_machine import IllegalEventError, InvariantError

A, B = NodeId("a"), NodeId("b")
EVENTS = st.one_of(
    st.just(MemberEnrolled()),
    st.just(MemberCordoned()),
    st.just(MemberUncordoned()),
    st.just(MemberRemoved()),
    st.just(MembershipTick()),
    st.builds(MemberConnected, st.integers(1, 40), st.sampled_from(["i", "j"]), st.booleans()),
    st.builds(MemberReported, st.integers(1, 40), st.booleans()),
    st.builds(MemberDisconnected, st.integers(1, 40)),
    st.builds(MemberGoodbye, st.integers(1, 40), st.sampled_from(["asleep", "leave", "stopping", "new word"])),
)


@given(st.lists(st.tuples(st.sampled_from([A, B]), EVENTS, st.floats(0, 20)), max_size=60))
def test_no_order_of_events_breaks_an_invariant(story: list[tuple[NodeId, Event, float]]) -> None:
    pool, now = restore_membership([A], 0.0), 0.0
    for node, event, pause in story:
        now += pause
        try:
            pool, _ = advance(pool, node, event, now)
        except IllegalEventError:
            continue
        pool.check()
        for _ in range(8):
            deadline = next_deadline(pool, now)
            if deadline is None or deadline > now:
                break
            pool, _ = tick(pool, now)
            pool.check()
        else:
            pytest.fail("ticking at the deadline must get somewhere")


def test_transition_table_has_every_event() -> None:
    assert set(TABLE) == set(Event.__args__)


def test_illegal_event_raises_a_typed_error() -> None:
    with pytest.raises(IllegalEventError, match="unknown"):
        advance(Membership(), A, MemberReported(1), 0.0)
    pool, _ = advance(Membership(), A, MemberConnected(3, "i"), 0.0)
    for event in (MemberReported(4), MemberConnected(3, "i"), MemberConnected(2, "i")):
        with pytest.raises(IllegalEventError):
            advance(pool, A, event, 0.0)
    with pytest.raises(IllegalEventError, match="left"):
        step(Member(A, NodeState.LEFT, 0.0, enrolled=False), MemberRemoved(), 0.0)


@pytest.mark.parametrize(
    ("member", "wrong"),
    [
        (Member(A, NodeState.READY, 0.0, last_report_at=0.0), "linked without a link"),
        (Member(A, NodeState.LOST, 0.0, link=1, newest=1), "gone with a link"),
        (Member(A, NodeState.READY, 0.0, last_report_at=0.0, link=1, newest=2), "link is not the newest"),
        (Member(A, NodeState.LEFT, 0.0), "left but enrolled"),
        (
            Member(A, NodeState.READY, 0.0, last_report_at=0.0, link=1, newest=1, streak=1),
            "counts reports but is not suspect",
        ),
        (Member(A, NodeState.READY, 0.0, link=1, newest=1), "alive without a report"),
        (Member(A, NodeState.ASLEEP, 0.0, silent_at=1.0), "fell but is not missing"),
    ],
)
def test_a_contradiction_is_found_in_a_member_a_pool_and_a_step(member: Member, wrong: str) -> None:
    for check in (member.check, Membership({A: member}).check):
        with pytest.raises(InvariantError, match=wrong):
            check()
    if member.state is not NodeState.LEFT:
        with pytest.raises(InvariantError, match=wrong):
            step(member, MemberCordoned(), 0.0)


def test_a_pool_keeps_each_member_by_its_name() -> None:
    with pytest.raises(InvariantError, match="kept as"):
        Membership({B: Member(A, NodeState.LOST, 0.0)}).check()


def test_transition_outside_the_table_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLE[MembershipTick], NodeState.READY, frozenset({NodeState.READY}))
    with pytest.raises(InvariantError, match="ready -> suspect"):
        tick(ready(), 3.0)


def test_only_a_ready_node_that_is_not_cordoned_gets_work() -> None:
    ready = Member(A, NodeState.READY, 0.0, last_report_at=0.0, link=1, newest=1)
    assert ready.placeable
    assert not step(ready, MemberCordoned(), 0.0)[0].placeable
    assert not step(ready, MemberReported(1, draining=True), 0.0)[0].placeable
    assert not step(ready, MembershipTick(), 3.0)[0].placeable


def test_time_alone_does_nothing_to_a_quiet_pool() -> None:
    assert next_deadline(Membership(), 0.0) is None
    assert next_deadline(restore_membership([A, B], 0.0), 0.0) is None


def ready(node: NodeId = A, at: float = 0.0, *, link: int = 1, enrolled: bool = True) -> Membership:
    """Return a pool of one node that has reported."""
    pool = advance(Membership(), node, MemberEnrolled(), at)[0] if enrolled else Membership()
    pool, _ = advance(pool, node, MemberConnected(link, "i"), at)
    return advance(pool, node, MemberReported(link), at)[0]


def both(at: float = 0.0) -> Membership:
    """Return a pool of two nodes that have reported."""
    return Membership({**ready(A, at).members, **ready(B, at).members})


def test_a_silent_node_gets_no_work_after_3_s_and_is_lost_after_10() -> None:
    pool = ready()
    assert next_deadline(pool, 0.0) == 3.0
    pool, actions = tick(pool, 2.9)
    assert (pool.members[A].state, actions) == (NodeState.READY, ())
    pool, actions = tick(pool, 3.0)
    assert (pool.members[A].state, pool.members[A].reason, actions) == (
        NodeState.SUSPECT,
        "silent",
        (PublishMember(A),),
    )
    assert next_deadline(pool, 3.0) == 10.0
    pool, actions = tick(pool, 10.0)
    assert (pool.members[A].state, pool.members[A].link) == (NodeState.LOST, 0)
    reason = "silent for 10 s"
    assert (pool.members[A].reason, actions) == (
        reason,
        (CloseLink(A, 1, reason), ResumeRequests(A, reason), PublishMember(A)),
    )


def test_two_reports_less_than_3_s_apart_bring_a_suspect_back() -> None:
    pool, _ = tick(ready(), 3.0)
    for at, state in ((4.0, NodeState.SUSPECT), (7.0, NodeState.SUSPECT), (9.9, NodeState.READY)):
        pool, _ = advance(pool, A, MemberReported(1), at)
        assert pool.members[A].state is state, at
    assert (pool.members[A].reason, pool.members[A].streak, pool.members[A].silent_at) == ("", 0, None)


def test_a_pause_is_shown_before_a_drain_and_both_end_with_a_report() -> None:
    pool = ready()
    for event, state in (
        (MemberReported(1, draining=True), NodeState.DRAINING),
        (MemberReported(1, draining=True, paused=True), NodeState.PAUSED),
        (MemberReported(1), NodeState.READY),
    ):
        pool, _ = advance(pool, A, event, 1.0)
        assert pool.members[A].state is state


def test_event_of_a_former_link_changes_nothing() -> None:
    pool, actions = advance(ready(), A, MemberConnected(2, "j"), 1.0)
    assert actions == (CloseLink(A, 1, "replaced by a newer link"), ResumeRequests(A, "replaced"), PublishMember(A))
    for event in (MemberReported(1), MemberDisconnected(1), MemberGoodbye(1, "leave")):
        after, actions = advance(pool, A, event, 2.0)
        assert (after.members, actions) == (pool.members, ())
    pool, actions = advance(pool, A, MemberConnected(3, "j", takeover=True), 3.0)
    assert (pool.members[A].link, actions) == (3, (PublishMember(A),)), "a second link of one process loses nothing"
    pool, actions = advance(pool, A, MemberConnected(4, "another", takeover=True), 3.0)
    assert ResumeRequests(A, "replaced") in actions, "another process cannot take over"


@pytest.mark.parametrize(
    ("reason", "state", "enrolled"),
    [("asleep", NodeState.ASLEEP, True), ("leave", NodeState.LEFT, False), ("stopping", NodeState.LOST, True)],
)
def test_goodbye_reason_decides_the_state(reason: str, state: NodeState, enrolled: bool) -> None:
    pool, actions = advance(ready(), A, MemberGoodbye(1, reason), 1.0)
    member = pool.members[A]
    assert (member.state, member.enrolled, member.link, member.silent_at) == (state, enrolled, 0, None)
    assert [type(action) for action in actions] == [CloseLink, ResumeRequests, PublishMember]


def test_a_cordon_stays_over_every_state_until_it_is_taken_back() -> None:
    pool, _ = advance(ready(), A, MemberCordoned(), 1.0)
    for event in (
        MemberDisconnected(1),
        MemberConnected(2, "i"),
        MemberReported(2),
        MemberGoodbye(2, "asleep"),
        MemberConnected(3, "i"),
        MemberReported(3),
    ):
        pool, _ = advance(pool, A, event, 2.0)
        assert pool.members[A].cordoned
        assert not pool.members[A].placeable
    pool, _ = advance(pool, A, MemberUncordoned(), 3.0)
    assert pool.members[A].placeable
    assert restore_membership([A, B], 5.0, [B]).members[B].cordoned
    assert not restore_membership([A, B], 5.0, [B]).members[A].cordoned


def test_former_member_is_deleted_after_10_minutes() -> None:
    pool, _ = advance(both(), A, MemberGoodbye(1, "leave"), 10.0)
    pool, _ = advance(pool, B, MemberGoodbye(1, "stopping"), 10.0)
    assert next_deadline(pool, 10.0) == 10.0 + DELETE_AFTER_SECONDS
    pool, actions = tick(pool, 9.0 + DELETE_AFTER_SECONDS)
    assert actions == ()
    pool, actions = tick(pool, 10.0 + DELETE_AFTER_SECONDS)
    assert actions == (DeleteMember(A),)
    assert set(pool.members) == {B}
    assert next_deadline(pool, 10.0**6) is None


def test_coordinator_suspects_itself_when_half_of_the_nodes_fall_silent() -> None:
    pool, _ = tick(both(), 3.0)
    assert pool.self_suspect
    back, _ = advance(pool, A, MemberReported(1), 3.5)
    back, _ = advance(back, A, MemberReported(1), 4.0)
    assert back.self_suspect, "one of two is still half"
    for at in (4.5, 5.0):
        back, _ = advance(back, B, MemberReported(1), at)
    assert not back.self_suspect
    pool, _ = tick(pool, 3.0 + DELETE_AFTER_SECONDS)
    assert not pool.self_suspect, "after 10 minutes the nodes are the cause"
    alone, _ = tick(ready(), 3.0)
    assert not alone.self_suspect, "one node is no half"


@pytest.mark.parametrize(("apart", "suspects"), [(4.0, True), (6.0, False)])
def test_coordinator_does_not_suspect_itself_for_separate_losses(apart: float, suspects: bool) -> None:
    names = [NodeId(name) for name in "abcd"]
    pool = Membership({name: ready(name).members[name] for name in names})

    def report_nodes(at: float, *nodes: NodeId) -> None:
        nonlocal pool
        pool, _ = tick(pool, at)
        for node in nodes:
            pool, _ = advance(pool, node, MemberReported(1), at)

    report_nodes(2.0, *names[1:])
    report_nodes(3.0, *names[1:])
    assert not pool.self_suspect, "one of four"
    for second in range(1, int(apart) + 1):
        report_nodes(3.0 + second, *(names[1:] if second <= apart - 3 else names[2:]))
    assert pool.members[names[1]].state is NodeState.SUSPECT
    assert pool.self_suspect is suspects


@pytest.mark.parametrize(
    ("before", "event", "state", "since", "fell"),
    [
        ("ready", MemberEnrolled(), NodeState.READY, 0.0, None),
        ("ready", MemberReported(1), NodeState.READY, 0.0, None),
        ("ready", MemberReported(1, paused=True), NodeState.PAUSED, 5.0, None),
        ("ready", MemberDisconnected(1), NodeState.LOST, 5.0, 5.0),
        ("joining", MemberDisconnected(1), NodeState.LOST, 5.0, None),
        ("suspect", MemberDisconnected(1), NodeState.LOST, 5.0, 3.0),
        ("suspect", MemberGoodbye(1, "asleep"), NodeState.ASLEEP, 5.0, None),
        ("suspect", MemberGoodbye(1, "stopping"), NodeState.LOST, 5.0, 3.0),
    ],
)
def test_event_updates_since_and_silent_at_of_a_member(
    before: str, event: Event, state: NodeState, since: float, fell: float | None
) -> None:
    joining, _ = advance(advance(Membership(), A, MemberEnrolled(), 0.0)[0], A, MemberConnected(1, "i"), 0.0)
    pools = {"ready": ready(), "joining": joining, "suspect": tick(ready(), 3.0)[0]}
    pool, _ = advance(pools[before], A, event, 5.0)
    member = pool.members[A]
    assert (member.state, member.since, member.silent_at) == (state, since, fell)


def test_a_new_node_has_10_s_to_connect_and_to_report_and_so_has_one_that_is_enrolled_again() -> None:
    lost, _ = advance(ready(), A, MemberGoodbye(1, "leave"), 1.0)
    for begin, pool in ((0.0, Membership()), (100.0, lost)):
        pool, actions = advance(pool, A, MemberEnrolled(), begin)
        assert (actions, next_deadline(pool, begin)) == ((PublishMember(A),), begin + 10.0)
        gone, actions = tick(pool, begin + 10.0)
        assert (gone.members[A].state, gone.members[A].reason) == (NodeState.LOST, "never connected")
        assert actions == (PublishMember(A),)
        pool, _ = advance(pool, A, MemberConnected(2, "i"), begin + 4.0)
        assert next_deadline(pool, begin + 4.0) == begin + 14.0


def test_a_deadline_that_is_over_is_now() -> None:
    assert next_deadline(ready(), 100.0) == 100.0


def test_while_the_coordinator_suspects_itself_no_node_is_forgotten() -> None:
    stranger = Member(NodeId("c"), NodeState.LOST, 0.0, enrolled=False)
    pool = Membership({**both(598.0).members, stranger.node: stranger})
    pool, _ = tick(pool, 601.0)
    assert pool.self_suspect
    assert set(pool.members) == {A, B, stranger.node}
    assert next_deadline(pool, 601.0) == 608.0
    pool, actions = tick(pool, 1200.9)
    assert pool.self_suspect
    assert DeleteMember(stranger.node) not in actions
    pool, actions = tick(pool, 1201.0)
    assert actions == (DeleteMember(stranger.node),)


def test_a_report_alone_ends_the_doubt_after_10_minutes() -> None:
    pool, _ = tick(both(), 3.0)
    pool, _ = advance(pool, A, MemberReported(1), 2.0 + DELETE_AFTER_SECONDS)
    assert pool.self_suspect
    pool, _ = advance(pool, A, MemberCordoned(), 3.0 + DELETE_AFTER_SECONDS)
    assert not pool.self_suspect
