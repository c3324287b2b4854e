"""Speeds of benchmarks, and their records on the disk."""

import asyncio
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from coordinator.model_tools import benchmark_records
from coordinator.model_tools.benchmark import BENCHMARK_KEY, Benchmark, add_benchmark_key, summarize_run
from coordinator.model_tools.benchmark_records import BenchmarkRecord, BenchmarkRecords, BenchmarkRun
from router.admission.rate_limits import KeyLimits
from router.placement.cluster_view import NodeView
from tests.support.cluster.loopback_cluster import a_model
from tests.support.cluster.manual_pool import A, B, Cluster, turn
from wire.capacity.arithmetic import compute_max_context
from wire.frames import Cancel, Finished, Generate, Refusal, Timings
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
    rows = [finished(512, 128, 0.5 * at, 0.5, 4.0 - at) for at in range(4)]
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


@pytest.mark.parametrize("views", [{}, {"a": NodeView(NodeId("a"), "studio", "ready")}])
async def test_a_node_or_model_that_left_the_pool_is_a_refusal(views: dict[str, NodeView]):
    pool = Cluster(A)
    measured = await Benchmark(pool.dispatcher, lambda: views["a"], "big").measure(("M4", "macOS 26.1", "1.2.3"))
    assert isinstance(measured, Refused)
    assert (measured.code, measured.status) == (RefusalCode.NO_MODEL, 404)
    assert "left the pool" in measured.message
    assert pool.generates() == []


class BenchmarkedNode:
    """A benchmark of node A in a pool of two nodes, and the requests that A gets."""

    def __init__(self, **model: object) -> None:
        self.pool = Cluster(A, B)
        self.pool.models = (a_model(**model),)  # pyright: ignore[reportArgumentType]
        self.pool.limits[BENCHMARK_KEY] = KeyLimits(priority="low", upstreams=False)
        self.pool.report()
        benchmark = Benchmark(self.pool.dispatcher, lambda: self.pool.seen(A), "tiny")
        self.task = asyncio.create_task(benchmark.measure(("M4", "macOS 26.1", "1.2.3")))
        self.seen = 0

    async def take(self) -> list[Generate]:
        """Return the requests that the node got since the last call."""
        await turn()
        new, self.seen = self.pool.generates()[self.seen :], len(self.pool.generates())
        assert {node for node, _ in new} <= {A}
        return [frame for _, frame in new]

    def finish(self, frame: Generate) -> None:
        """Receive the end of a request with 128 tokens: 0.5 s of prefill, 2 s of decode."""
        timings = Timings(0.0, 0.5, 2.0)
        assert frame.ids is not None
        answer = Finished(frame.request, ("length",), len(frame.ids), 128, 0, timings)
        self.pool.dispatcher.receive(A, answer)


async def test_measure_sends_every_length_and_number_of_requests_after_one_that_loads_the_model():
    node = BenchmarkedNode(context=32_768)
    waves: list[list[Generate]] = []
    while not node.task.done():
        waves.append(await node.take())
        for frame in waves[-1]:
            node.finish(frame)
    assert [[len(frame.ids or ()) for frame in wave] for wave in waves if wave] == [
        [16],
        [512],
        [512] * 4,
        [2048],
        [2048] * 4,
    ]
    frames = [frame for wave in waves for frame in wave]
    assert [frame.params.max_tokens for frame in frames] == [1] + [128] * 10
    assert {frame.params.temperature for frame in frames} == {1.0}
    assert len({frame.ids for frame in frames}) == len(frames), "no prefix cache shortens a prompt"
    assert all(32 <= token < 480 for frame in frames for token in frame.ids or ())
    record = await node.task
    assert isinstance(record, BenchmarkRecord)
    row = record.to_row()
    measured, most = row.pop("measured"), row.pop("max_prompt")
    assert isinstance(measured, float)
    assert abs(measured - time.time()) < 60
    assert most == compute_max_context(node.pool.seen(A).memory, node.pool.models[0])
    speeds = [
        {"prompt_tokens": tokens, "parallel": count, "generated": 128 * count, "skipped": ""}
        | {"prefill_speed": tokens * count / 0.5, "decode_speed": 63.5 * count}
        for tokens in (512, 2048)
        for count in (1, 4)
    ]
    assert row == {
        "model": "tiny",
        "fingerprint": "tiny-1",
        "content": "",
        "chip": "M4",
        "system": "macOS 26.1",
        "software": "1.2.3",
        "runs": speeds,
    }
    node.pool.settled()


async def test_a_profiled_model_has_the_measured_maximum():
    node = BenchmarkedNode(context=32_768, profiled=True, max_context=7777)
    while not node.task.done():
        for frame in await node.take():
            node.finish(frame)
    record = await node.task
    assert isinstance(record, BenchmarkRecord)
    assert record.max_prompt == 7777


async def test_lengths_beyond_the_context_are_skipped():
    node = BenchmarkedNode(context=2048 + 127)
    count = 0
    while not node.task.done():
        for frame in await node.take():
            node.finish(frame)
            count += 1
    record = await node.task
    assert isinstance(record, BenchmarkRecord)
    assert count == 1 + 1 + 4
    assert [run.skipped for run in record.runs] == ["", ""] + ["the context of the model is 2175 tokens"] * 2


async def test_a_failed_load_ends_the_measurement_with_its_reason():
    node = BenchmarkedNode()
    (frame,) = await node.take()
    refused = Refused(RefusalCode.TOO_LARGE, "needs 43.5 GB, the node has 31.0 GB")
    node.pool.dispatcher.receive(A, Refusal(frame.request, refused, None))
    result = await node.task
    assert isinstance(result, Refused)
    assert "needs 43.5 GB" in result.message
    node.pool.settled()


async def test_a_run_that_does_not_fit_is_skipped_and_its_other_requests_are_closed():
    node = BenchmarkedNode(context=32_768)
    wave: list[Generate] = []
    while len(wave) < 4:
        for frame in wave:
            node.finish(frame)
        wave = await node.take()
    first, *rest = wave
    node.pool.dispatcher.receive(A, Refusal(first.request, Refused(RefusalCode.TOO_LARGE, "needs 43.5 GB"), None))
    for frame in rest:
        node.finish(frame)
    while not node.task.done():
        for frame in await node.take():
            node.finish(frame)
    record = await node.task
    assert isinstance(record, BenchmarkRecord)
    assert ["needs 43.5 GB" in run.skipped for run in record.runs] == [False, True, False, False]
    node.pool.settled()


async def test_a_cancelled_measurement_cancels_its_requests():
    node = BenchmarkedNode()
    (frame,) = await node.take()
    node.task.cancel()
    await asyncio.wait([node.task])
    assert node.task.cancelled()
    assert (A, Cancel(frame.request)) in node.pool.sent
    node.pool.settled()


@pytest.mark.parametrize(("generated", "speed"), [(15, 0.0), (16, 14.0)])
def test_the_speed_of_decode_needs_eight_tokens_of_each_request(generated: int, speed: float):
    rows = [finished(512, 8, 0.0, 0.5, 1.0), finished(512, generated - 8, 0.0, 0.5, 1.0)]
    assert summarize_run(512, rows).decode_speed == speed
    assert summarize_run(512, [finished(512, 8, 0.0, 0.0, 1.0)]).prefill_speed == 0.0
