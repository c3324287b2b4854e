import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from node.video import lease_rules
from node.video.lease_rules import LeaseLedger, LeasePhase, LeaseRecord, WorkerGroup
from wire.capacity.arithmetic import Fits, compute_headroom, judge
from wire.frames import LeaseEnded, LeaseRequest
from wire.refusals import RefusalCode
from wire.report import Memory, Model
from wire.units import GIB
from wire.video import LeaseRefusalCode, LeaseState

MEMORY = Memory(cap=100 * GIB, ceiling=100 * GIB, margin=10 * GIB, phys=30 * GIB, active=20 * GIB, base=GIB)


def ask(size: int = 36 * GIB, *, lease: str = "l-1", generation: int = 1, job: str = "video_1") -> LeaseRequest:
    return LeaseRequest(lease, generation, job, "wan", size, b"{}")


def held(*, lease: str = "l-1", generation: int = 1, job: str = "video_1", ended: bool = False) -> LeaseRecord:
    end = LeaseEnded(lease, generation, "completed", peak=7) if ended else None
    return LeaseRecord(lease=lease, generation=generation, job=job, model="wan", size=36 * GIB, ended=end)


def test_a_lease_fits_exactly_up_to_the_headroom():
    assert lease_rules.check_fits(ask(60 * GIB), MEMORY, (), frozenset()) is None
    refused = lease_rules.check_fits(ask(60 * GIB + 1), MEMORY, (), frozenset())
    assert refused is not None
    assert (refused.code, refused.need, refused.headroom) == ("no_headroom", 60 * GIB + 1, 60 * GIB)
    assert refused.retry_after == lease_rules.HEADROOM_RETRY_SECONDS


@given(st.integers(1, 200 * GIB), st.integers(0, 100 * GIB), st.integers(0, 40 * GIB))
def test_what_is_granted_leaves_the_headroom_at_least_nothing(size: int, phys: int, reserved: int):
    memory = Memory(cap=100 * GIB, ceiling=100 * GIB, margin=10 * GIB, phys=phys, reserved=reserved)
    granted = lease_rules.check_fits(ask(size), memory, (), frozenset()) is None
    after = compute_headroom(memory.ceiling - size, memory.margin, phys, reserved)
    assert after is not None
    assert granted == (after >= 0)
    assert granted == isinstance(judge(memory, size), Fits)


def test_a_refusal_names_the_holders_of_the_memory():
    models = (
        Model("kept", loaded=True),
        Model("used", loaded=True),
        Model("coming", loading=True),
        Model("away"),
    )
    refused = lease_rules.check_fits(ask(70 * GIB), MEMORY, models, frozenset({"kept"}))
    assert refused is not None
    held_by = "10.0 GiB more headroom, held by kept (preloaded), used (in use), coming (loading)"
    assert refused.waiting_for == held_by


@pytest.mark.parametrize(("bound_by", "text"), [("dynamic", "dynamic"), ("", "the cap")])
def test_a_refusal_without_models_names_the_bound_of_the_memory(bound_by: str, text: str):
    refused = lease_rules.check_fits(ask(70 * GIB), replace(MEMORY, bound_by=bound_by), (Model("away"),), frozenset())
    assert refused is not None
    assert refused.waiting_for == f"10.0 GiB more headroom, bound by {text}"


def test_no_lease_is_granted_if_the_footprint_is_unreadable():
    memory = Memory(cap=100 * GIB, ceiling=100 * GIB, margin=GIB, phys=None)
    refused = lease_rules.check_fits(ask(), memory, (), frozenset())
    assert refused is not None
    assert (refused.code, refused.headroom, refused.retry_after) == ("memory_unreadable", None, 2.0)
    assert refused.waiting_for == "a reading of the engine's footprint"


def test_no_lease_is_granted_if_the_guard_is_off():
    refused = lease_rules.check_ready(ask(), Memory(cap=100 * GIB, ceiling=100 * GIB, phys=0, guard=False), "")
    assert refused is not None
    assert (refused.code, refused.retry_after) == ("guard_off", 0.0)


def test_what_can_never_fit_is_refused_for_good():
    refused = lease_rules.check_ready(ask(89 * GIB + 1), MEMORY, "")
    assert refused is not None
    assert (refused.code, refused.retry_after) == ("lease_too_large", 0.0)
    assert lease_rules.check_ready(ask(89 * GIB), MEMORY, "") is None


def test_one_lease_at_a_time():
    refused = lease_rules.check_generation(ask(lease="l-2", job="video_2"), LeaseLedger().put(held()))
    assert refused is not None
    assert (refused.code, "36.0 GiB to video_1" in refused.message) == ("lease_held", True)
    assert lease_rules.check_generation(ask(lease="l-2", job="video_2"), LeaseLedger().put(held(ended=True))) is None


def test_an_older_generation_is_fenced_even_when_its_lease_is_forgotten():
    ledger = LeaseLedger().put(held(generation=3, ended=True)).drop("l-1", 3)
    for generation in (1, 2, 3):
        refused = lease_rules.check_generation(ask(lease="l-0", generation=generation), ledger)
        assert refused is not None
        assert refused.code == "lease_superseded"
    assert lease_rules.check_generation(ask(lease="l-4", generation=4), ledger) is None


def test_a_lease_may_be_requested_again_by_its_name_after_its_end():
    ended, holding = LeaseLedger().put(held(ended=True)), LeaseLedger().put(held())
    assert lease_rules.check_generation(ask(), ended) is None
    codes = [lease_rules.check_generation(ask(), holding), lease_rules.check_generation(ask(lease="l-2"), ended)]
    assert [one.code for one in codes if one is not None] == ["lease_held", "lease_superseded"]


def test_the_newest_generation_of_a_job_stays_and_others_leases_are_left_alone():
    one, two, first = held(generation=2), held(lease="l-2", job="video_2"), held(lease="l-0", generation=0, job="v")
    ledger = LeaseLedger().put(one).put(two).put(held(lease="l-9", generation=1)).put(first)
    assert ledger.newest == (("video_2", 1), ("video_1", 2), ("v", 0))
    assert [ledger.find("l-1", 2), ledger.find("l-2", 1), ledger.find("l-1", 1)] == [one, two, None]
    after = ledger.drop("l-1", 2)
    assert [held.lease for held in after.leases] == ["l-2", "l-9", "l-0"]
    assert after.newest == ledger.newest


def test_a_lease_is_found_by_both_of_its_names_and_written_in_its_place():
    ledger = LeaseLedger().put(held()).put(held(lease="l-2", job="video_2", ended=True))
    assert ledger.holding == held()
    worker = WorkerGroup(pid=7, born="x")
    after = ledger.put(LeaseRecord(lease="l-1", generation=1, job="video_1", model="wan", size=36 * GIB, worker=worker))
    assert len(after.leases) == 2
    assert after.holding is not None
    assert after.holding.worker == worker
    assert after.find("l-1", 2) is None
    assert after.put(held(ended=True)).holding is None


def test_the_number_of_stored_jobs_is_bounded():
    ledger = LeaseLedger()
    for number in range(lease_rules.MAX_JOBS_REMEMBERED + 10):
        ledger = ledger.put(held(lease=f"l-{number}", job=f"video_{number}", ended=True))
    assert len(ledger.newest) == lease_rules.MAX_JOBS_REMEMBERED
    assert ledger.newest[-1] == (f"video_{lease_rules.MAX_JOBS_REMEMBERED + 9}", 1)


def test_progress_never_falls_from_phase_to_phase():
    steps = [
        (LeasePhase.GRANTED, 0),
        (LeasePhase.STARTING, 0),
        (LeasePhase.LOADING, 0),
        *((LeasePhase.DENOISING, step) for step in range(21)),
        (LeasePhase.DECODING, 20),
        (LeasePhase.SAVING, 20),
        (LeasePhase.ENDED, 20),
    ]
    shown = [lease_rules.compute_progress(phase, step, 20) for phase, step in steps]
    assert shown == sorted(shown)
    assert (shown[0], shown[3], shown[-4], shown[-1]) == (0, 5, 95, 100)
    assert lease_rules.compute_progress(LeasePhase.DENOISING, 3, 0) == 5, "without a number of steps"


def test_an_ended_lease_holds_nothing_in_the_report():
    state = lease_rules.build_lease_state(held(ended=True), LeasePhase.DENOISING, 3, 20, 5 * GIB, 6 * GIB)
    assert state == LeaseState("l-1", 1, "video_1", 0, "ended", 100, 20, 20, 0, 7)


def test_a_held_lease_shows_its_size_its_phase_and_its_footprint_in_the_report():
    state = lease_rules.build_lease_state(held(), LeasePhase.DENOISING, 3, 20, 5 * GIB, 6 * GIB)
    assert state == LeaseState("l-1", 1, "video_1", 36 * GIB, "denoising", 18, 3, 20, 5 * GIB, 6 * GIB)


@pytest.mark.parametrize(("lease", "job"), [("l-1", "video_1"), ("a" * 96, "B" * 96), ("0", "_")])
def test_a_lease_with_plain_names_is_named(lease: str, job: str):
    assert lease_rules.check_name(ask(lease=lease, job=job, generation=0)) is None


@pytest.mark.parametrize(
    ("lease", "job", "generation"),
    [
        ("", "job", 1),
        ("../up", "job", 1),
        ("a/b", "job", 1),
        ("a" * 97, "job", 1),
        ("l\n", "job", 1),
        ("l", "", 1),
        ("l", "..", 1),
        ("l", "job", -1),
    ],
)
def test_a_lease_whose_names_could_leave_their_folder_is_refused(lease: str, job: str, generation: int):
    refused = lease_rules.check_name(ask(lease=lease, job=job, generation=generation))
    assert refused is not None
    assert (refused.code, refused.lease, refused.retry_after) == (RefusalCode.INVALID, lease, 0.0)


@pytest.mark.parametrize(
    ("size", "unready", "code", "retry_after"),
    [
        (1, "", "", 0.0),
        (0, "", RefusalCode.INVALID, 0.0),
        (-1, "", RefusalCode.INVALID, 0.0),
        (1, "no package", LeaseRefusalCode.VIDEO_NOT_READY, lease_rules.READY_RETRY_SECONDS),
    ],
)
def test_a_lease_needs_a_size_and_a_node_that_is_ready(size: int, unready: str, code: str, retry_after: float):
    refused = lease_rules.check_ready(ask(size), MEMORY, unready)
    assert (refused.code if refused else "", refused.retry_after if refused else 0.0) == (code, retry_after)


def test_a_node_without_a_known_cap_bars_no_size():
    assert lease_rules.check_ready(ask(2**50), Memory(), "") is None
