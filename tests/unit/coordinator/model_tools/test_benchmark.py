"""Speeds of benchmarks, and their records on the disk."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from coordinator.model_tools import benchmark_records
from coordinator.model_tools.benchmark import BENCHMARK_KEY, Benchmark, add_benchmark_key, summarize_run
from coordinator.model_tools.benchmark_records import BenchmarkRecord, BenchmarkRecords, BenchmarkRun
from router.admission.rate_limits import KeyLimits
from router.dispatch.active_request import ActiveRequest
from router.dispatch.request import RequestSpec
from router.placement.cluster_view import NodeView
from wire.frames import Finished, Timings
from wire.identity import NodeId
from wire.refusals import RefusalCode, Refused

RUN = BenchmarkRun(prompt_tokens=512, parallel=1, generated=128, prefill_speed=1000.0, decode_speed=50.0)
RECORD = BenchmarkRecord(
    node=NodeId("a"),
    model="big",
    fingerprint="f1",
    system="macOS 26.1",
    software="1.2.3",
    measured=100.0,
    max_prompt=32_000,
    runs=(RUN,),
)


def finished(tokens: int, generated: int, waiting: float, prefill: float, decode: float, cached: int = 0) -> Finished:
    return Finished(1, ("length",), tokens, generated, cached, Timings(waiting, prefill, decode))


def test_the_speed_of_one_request():
    run = summarize_run(512, [finished(512, 128, 0.0, 0.5, 2.0)])
    assert (run.prefill_speed, run.decode_speed, run.generated) == (1024.0, 63.5, 128)


def test_the_first_token_belongs_to_prefill():
    assert summarize_run(512, [finished(512, 101, 0.0, 1.0, 1.0)]).decode_speed == 100.0


def test_requests_at_once_are_counted_together():
    rows = [finished(512, 128, 0.5 * at, 0.5, 4.0) for at in range(4)]
    run = summarize_run(512, rows)
    assert (run.parallel, run.prefill_speed, run.decode_speed) == (4, 1024.0, 127.0)


def test_cached_tokens_are_no_prefill():
    assert summarize_run(512, [finished(512, 128, 0.0, 0.5, 2.0, cached=256)]).prefill_speed == 512.0


@pytest.mark.parametrize(("generated", "decode"), [(1, 0.0), (7, 1.0), (128, 0.0)])
def test_short_answers_have_no_speed_of_decode(generated: int, decode: float):
    assert summarize_run(512, [finished(512, generated, 0.0, 0.5, decode)]).decode_speed == 0.0


def test_the_key_of_benchmarks_has_low_priority_and_no_upstream():
    limits = add_benchmark_key(lambda key: KeyLimits(priority="high"))
    own, other = limits(BENCHMARK_KEY), limits("another")
    assert own is not None
    assert (own.priority, own.may_use_upstreams(default=True), other) == ("low", False, KeyLimits(priority="high"))


def test_the_newest_record_of_a_setup_is_kept(tmp_path: Path):
    records = BenchmarkRecords(tmp_path)
    newer = replace(RECORD, measured=200.0)
    records.store(RECORD)
    records.store(newer)
    assert records.list_all() == [newer]
    assert BenchmarkRecords(tmp_path).list_all() == [newer]
    assert (tmp_path / "benchmarks.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("field", ["node", "model", "fingerprint", "system", "software"])
def test_another_setup_has_its_own_record(tmp_path: Path, field: str):
    records = BenchmarkRecords(tmp_path)
    other = replace(RECORD, measured=200.0, **{field: "other"})
    records.store(RECORD)
    records.store(other)
    assert records.list_all() == [other, RECORD]


def test_the_newest_record_of_a_version_is_found(tmp_path: Path):
    records = BenchmarkRecords(tmp_path)
    updated = replace(RECORD, measured=200.0, software="1.2.4")
    for one in (updated, RECORD):
        records.store(one)
    assert records.find(NodeId("a"), "big", "f1") == updated
    assert records.find(NodeId("a"), "big", "f2") is None


def test_the_oldest_records_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(benchmark_records, "MAX_RECORDS", 2)
    records = BenchmarkRecords(tmp_path)
    for at in range(3):
        records.store(replace(RECORD, model=f"m{at}", measured=float(at)))
    assert [one.model for one in records.list_all()] == ["m2", "m1"]


def test_a_broken_file_has_no_records(tmp_path: Path):
    (tmp_path / "benchmarks.json").write_text("[{")
    assert BenchmarkRecords(tmp_path).list_all() == []


class NoSender:
    """Sender of a benchmark that sends no request."""

    def submit(self, spec: RequestSpec) -> ActiveRequest:
        """Fail the test."""
        raise AssertionError(spec)

    def close(self, request: ActiveRequest) -> None:
        """Fail the test."""
        raise AssertionError(request)


@pytest.mark.parametrize("views", [{}, {"a": NodeView(NodeId("a"), "studio", "ready")}])
async def test_a_node_or_model_that_left_the_pool_is_a_refusal(views: dict[str, NodeView]):
    measured = await Benchmark(NoSender(), lambda: views["a"], "big").measure(("M4", "macOS 26.1", "1.2.3"))
    assert isinstance(measured, Refused)
    assert (measured.code, measured.status) == (RefusalCode.NO_MODEL, 404)
    assert "left the pool" in measured.message
