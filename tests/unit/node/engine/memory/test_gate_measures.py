"""Counts of the gate for metrics: checks by site, refusals by reason, predicted peaks as shares of the ceiling."""

from node.engine.memory.gate import GateSite, MemoryGate, MlxCounters
from node.memory.reading import MemoryReading
from wire.frames import MemoryLimits
from wire.histogram import PREDICTED_BOUNDS, TRANSIENT_BOUNDS
from wire.report import Memory
from wire.units import GIB

READING = MemoryReading(40 * GIB, "statm", 100.0)


def memory_of(gate: MemoryGate, reading: MemoryReading = READING) -> Memory:
    return gate.build_memory(MlxCounters(active=10 * GIB, recent=20 * GIB, reserved=8 * GIB), reading, 128 * GIB, 100.0)


def test_checks_are_counted_by_site_and_refusals_by_reason():
    gate = MemoryGate()
    gate.check(GateSite.PREFLIGHT, memory_of(gate), 1)
    gate.set_limits(MemoryLimits(100 * GIB, 100 * GIB, 2 * GIB, "static"))
    gate.check(GateSite.PREFILL, memory_of(gate), 1)
    gate.check(GateSite.PREFILL, memory_of(gate), 50 * GIB)
    gate.check(GateSite.JOIN, memory_of(gate), 51 * GIB)
    gate.check(GateSite.GROW, memory_of(gate, MemoryReading(None, "statm", 100.0)), 1)
    measures = gate.get_measures()
    assert measures.checks == (("preflight", 1), ("prefill", 2), ("join", 1), ("grow", 1))
    assert dict(measures.refusals) == {"engine_not_ready": 1, "no_headroom": 1, "memory_unreadable": 1}


def test_a_predicted_peak_is_the_share_of_the_ceiling_that_the_verdict_compares():
    """40 GiB current, 8 reserved, 2 margin and 20 or 50 estimated, with a ceiling of 100: 0.7 and 1.0."""
    gate = MemoryGate()
    gate.set_limits(MemoryLimits(100 * GIB, 100 * GIB, 2 * GIB, "static"))
    for estimate in (20, 50, 50):
        gate.check(GateSite.PREFILL, memory_of(gate), estimate * GIB)
    predicted = gate.get_measures().predicted
    assert round(predicted.total, 9) == 2.7
    found = {bound: count for bound, count in zip(PREDICTED_BOUNDS, predicted.counts, strict=False) if count}
    assert found == {0.7: 1, 1.0: 2}


def test_a_check_without_a_reading_predicts_nothing():
    gate = MemoryGate()
    gate.set_limits(MemoryLimits(100 * GIB, 100 * GIB, 2 * GIB, "static"))
    gate.check(GateSite.PREFILL, memory_of(gate, MemoryReading(None, "statm", 100.0)), 1)
    assert sum(gate.get_measures().predicted.counts) == 0
    assert gate.get_measures().checks == (("prefill", 1),)


def test_a_transient_falls_into_its_bucket_with_its_bytes():
    gate = MemoryGate()
    for mebibytes in (16, 17):
        gate.transient.observe(mebibytes * 2**20)
    transient = gate.get_measures().transient
    assert (transient.counts[0], transient.counts[1], transient.total) == (1, 1, 33 * 2.0**20)
    assert TRANSIENT_BOUNDS[0] == 16 * 2**20
