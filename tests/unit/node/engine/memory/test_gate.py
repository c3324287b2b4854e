import pytest

from node.engine.memory.gate import GateSite, MemoryGate, MlxCounters
from node.memory.reading import STALE_AFTER_SECONDS, MemoryReading
from wire.capacity import arithmetic
from wire.capacity.arithmetic import Fits
from wire.frames import MemoryLimits
from wire.histogram import PREDICTED_BOUNDS, TRANSIENT_BOUNDS, GateMeasures, Histogram
from wire.refusals import RefusalCode, Refused
from wire.units import GIB

USE = MlxCounters(active=10 * GIB, recent=12 * GIB, reserved=3 * GIB)
READING = MemoryReading(11 * GIB, "statm", 100.0)


def gate(limits: MemoryLimits | None) -> MemoryGate:
    made = MemoryGate()
    if limits is not None:
        made.set_limits(limits)
    return made


@pytest.mark.parametrize(
    ("limits", "reading", "armed"),
    [
        (None, READING, False),
        (MemoryLimits(0, 0, 0, ""), READING, False),
        (MemoryLimits(64 * GIB, 64 * GIB, GIB, "static", guard=False), READING, False),
        (MemoryLimits(64 * GIB, 64 * GIB, GIB, "static"), MemoryReading(None, "statm", 100.0), False),
        (
            MemoryLimits(64 * GIB, 64 * GIB, GIB, "static"),
            MemoryReading(GIB, "statm", 100.0 - STALE_AFTER_SECONDS - 1),
            False,
        ),
        (MemoryLimits(64 * GIB, 64 * GIB, GIB, "static"), READING, True),
        (MemoryLimits(64 * GIB, 64 * GIB, 0, "static"), READING, True),
        (MemoryLimits(1, 1, 0, "static"), READING, True),
        (MemoryLimits(-1, 64 * GIB, 0, "static"), READING, False),
    ],
)
def test_a_gate_is_armed_only_when_it_could_refuse_on_facts(
    limits: MemoryLimits | None, reading: MemoryReading, armed: bool
):
    under_test = gate(limits)
    assert under_test.is_armed(reading, 100.0) is armed
    assert under_test.build_memory(USE, reading, 128 * GIB, 100.0).armed is armed


@pytest.mark.parametrize("site", list(GateSite))
@pytest.mark.parametrize(
    ("limits", "reading", "code"),
    [
        (None, READING, RefusalCode.NOT_READY),
        (MemoryLimits(0, 0, 0, ""), READING, RefusalCode.NOT_READY),
        (MemoryLimits(-1, 64 * GIB, 0, ""), READING, RefusalCode.NOT_READY),
        (MemoryLimits(1, 1, 0, ""), READING, RefusalCode.NO_ROOM),
        (MemoryLimits(64 * GIB, 64 * GIB, GIB, ""), MemoryReading(None, "statm", 100.0), RefusalCode.UNREADABLE),
        (MemoryLimits(64 * GIB, 64 * GIB, GIB, ""), MemoryReading(GIB, "statm", 10.0), RefusalCode.UNREADABLE),
        (MemoryLimits(64 * GIB, 16 * GIB, GIB, ""), READING, RefusalCode.NO_ROOM),
    ],
)
def test_a_closed_gate_refuses_at_every_site_and_counts(
    site: GateSite, limits: MemoryLimits | None, reading: MemoryReading, code: RefusalCode
):
    under_test = gate(limits)
    answer = under_test.check(site, under_test.build_memory(USE, reading, 128 * GIB, 100.0), 1)
    assert isinstance(answer, Refused)
    assert answer.code is code
    assert (under_test.checks[site], under_test.refusals[site]) == (1, 1)


def test_the_answer_is_the_verdicts_to_the_byte():
    under_test = gate(MemoryLimits(64 * GIB, 20 * GIB, GIB, "dynamic", leases=7))
    memory = under_test.build_memory(USE, READING, 128 * GIB, 100.5)
    assert memory.current == 12 * GIB
    assert memory.headroom == 4 * GIB
    assert (memory.leases, memory.bound_by, memory.age, memory.total) == (7, "dynamic", 0.5, 128 * GIB)
    assert isinstance(under_test.check(GateSite.JOIN, memory, 4 * GIB), Fits)
    refused = under_test.check(GateSite.JOIN, memory, 4 * GIB + 1)
    assert refused == arithmetic.judge(memory, 4 * GIB + 1)
    assert (under_test.checks[GateSite.JOIN], under_test.refusals[GateSite.JOIN]) == (2, 1)


def test_the_guard_passes_everything_only_when_it_is_off_by_name():
    under_test = gate(MemoryLimits(0, 0, 0, "", guard=False))
    memory = under_test.build_memory(USE, MemoryReading(None, "statm", 0.0), 0, 100.0)
    assert isinstance(under_test.check(GateSite.PREFILL, memory, 2**50), Fits)
    assert under_test.describe()["state"] == "OFF"


def test_before_the_first_limits_the_gate_is_closed_without_room():
    under_test = gate(None)
    assert under_test.limits_number == 0
    assert under_test.describe() == {"state": "closed"}
    memory = under_test.build_memory(USE, READING, 128 * GIB, 100.0)
    assert (memory.cap, memory.ceiling, memory.margin, memory.bound_by) == (0, 0, 0, "")
    assert memory.headroom == -15 * GIB
    refused = under_test.refuse_unless_ready()
    assert refused is not None
    assert refused.message == "the engine has received no memory limits yet and starts no requests: retry"
    assert refused.retry_after == 1.0
    without_cap = gate(MemoryLimits(0, 0, 0, "")).refuse_unless_ready()
    assert without_cap is not None
    assert "has memory limits with a cap of 0 bytes" in without_cap.message
    under_test.set_limits(MemoryLimits(64 * GIB, 64 * GIB, GIB, "static", number=7))
    assert under_test.limits_number == 7
    assert under_test.refuse_unless_ready() is None


def test_a_missing_value_is_reported_as_nothing_and_a_given_one_as_it_is():
    under_test = gate(MemoryLimits(64 * GIB, 64 * GIB, GIB, "static"))
    plain = under_test.build_memory(USE, READING, 128 * GIB, 100.0)
    assert (plain.base, plain.cache, plain.peak) == (0, 0, 0)
    assert (plain.cap, plain.ceiling, plain.active, plain.source) == (64 * GIB, 64 * GIB, USE.active, READING.source)
    told = under_test.build_memory(
        MlxCounters(10 * GIB, 12 * GIB, 3 * GIB, cache=5, peak=6), READING, 128 * GIB, 100.0, base=4
    )
    assert (told.base, told.cache, told.peak) == (4, 5, 6)
    assert told.current == plain.current, "free buffers, peak and base are reported and do not decide"


def test_a_reading_from_a_clock_ahead_is_of_no_age():
    assert gate(None).build_memory(USE, READING, 0, 99.5).age == 0.0


@pytest.mark.parametrize(
    ("automatic", "residual", "margin"),
    [(True, 10 * GIB, int(10 * GIB * 12 / 10.6)), (True, 0, 2 * GIB), (True, None, 15 * GIB), (False, 0, 15 * GIB)],
)
def test_the_automatic_margin_follows_the_profiles_of_all_models(automatic: bool, residual: int | None, margin: int):
    under_test = MemoryGate(lambda: residual)
    under_test.set_limits(MemoryLimits(100 * GIB, 100 * GIB, 15 * GIB, "static", margin_auto=automatic))
    memory = under_test.build_memory(USE, READING, 128 * GIB, 100.0)
    assert memory.margin == margin
    assert memory.headroom == 100 * GIB - margin - 12 * GIB - 3 * GIB
    decided = "setting" if not automatic else "no profile" if residual is None else "profiles"
    assert under_test.describe() == {"state": "on", "cap": 100 * GIB, "margin": margin, "margin_from": decided}


def test_gate_measures_count_checks_refusals_and_predicted_peaks():
    under_test = gate(MemoryLimits(64 * GIB, 20 * GIB, GIB, "dynamic"))
    memory = under_test.build_memory(USE, READING, 128 * GIB, 100.0)
    unreadable = under_test.build_memory(USE, MemoryReading(None, "statm", 100.0), 128 * GIB, 100.0)
    empty = gate(None).build_memory(USE, READING, 128 * GIB, 100.0)
    for estimate in (GIB, 14 * GIB, 14 * GIB):
        under_test.check(GateSite.JOIN, memory, estimate)
    under_test.check(GateSite.PREFILL, unreadable, 1)
    under_test.check(GateSite.PREFILL, empty, 1)
    under_test.transient.observe(5)
    predicted, transient = Histogram(PREDICTED_BOUNDS), Histogram(TRANSIENT_BOUNDS)
    predicted.observe(1 + (1 - 4) / 20)
    predicted.observe(1 + (14 - 4) / 20, times=2)
    transient.observe(5)
    measured = under_test.get_measures()
    assert measured == GateMeasures(
        (("join", 3), ("prefill", 2)),
        ((RefusalCode.NO_ROOM.value, 3), (RefusalCode.UNREADABLE.value, 1)),
        predicted.tally(),
        transient.tally(),
    )


def test_gate_counts_a_predicted_peak_under_a_ceiling_of_one_byte():
    under_test = gate(MemoryLimits(1, 1, 0, ""))
    under_test.check(
        GateSite.GROW, under_test.build_memory(MlxCounters(0, 0, 0), MemoryReading(0, "statm", 100.0), GIB, 100.0), 1
    )
    assert under_test.get_measures().predicted.total == 1.0


def test_gate_judges_a_load_without_the_margin():
    under_test = gate(MemoryLimits(64 * GIB, 20 * GIB, GIB, "static"))
    memory = under_test.build_memory(USE, READING, 128 * GIB, 100.0)
    assert isinstance(under_test.check(GateSite.LOAD, memory, 5 * GIB, load=True), Fits)
    assert isinstance(under_test.check(GateSite.LOAD, memory, 5 * GIB + 1, load=True), Refused)
    assert isinstance(under_test.check(GateSite.LOAD, memory, 5 * GIB), Refused)


@pytest.mark.parametrize(("residual", "narrowed"), [(None, 0), (0, 13 * GIB), (50 * GIB, 0)])
def test_gate_reports_by_how_much_profiles_narrow_the_margin(residual: int | None, narrowed: int):
    under_test = MemoryGate(lambda: residual)
    assert under_test.compute_narrowed_bytes() == 0
    under_test.set_limits(MemoryLimits(100 * GIB, 100 * GIB, 15 * GIB, "static", margin_auto=True))
    assert under_test.compute_narrowed_bytes() == narrowed


def test_the_cap_in_force_is_zero_before_the_first_limits():
    assert gate(None).cap == 0
    assert gate(MemoryLimits(64 * GIB, 32 * GIB, GIB, "static")).cap == 64 * GIB
