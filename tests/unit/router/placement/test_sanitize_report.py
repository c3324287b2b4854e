import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from router.placement.cluster_view import NodeView
from router.placement.sanitize_report import (
    MAX_BYTES,
    MAX_CONTEXT,
    MAX_EVICTIONS,
    MAX_EXPECTED_OUTPUT,
    MAX_HASH_BYTES,
    MAX_KV_STEP,
    MAX_LOAD_SECONDS,
    MAX_TEXT_CHARS,
    MAX_UNIX_SECONDS,
    UNMEASURED_DECODE,
    UNMEASURED_PREFILL,
    build_node_view,
    sanitize_memory,
    sanitize_video,
)
from wire.capacity.arithmetic import Fits, estimate_request_need, judge
from wire.enforcer_report import Enforcement
from wire.frames import Report
from wire.identity import NodeId
from wire.machine import Disk, SystemMemory
from wire.report import (
    BatchGroup,
    CacheState,
    EngineState,
    Memory,
    MemoryLevel,
    Model,
    ModelCache,
    Sharing,
    TransientModel,
)
from wire.video import LeaseState, VideoPackage, VideoState

wild_ints = st.integers(-(2**63), 2**63 - 1)
wild_floats = st.floats(allow_nan=True, allow_infinity=True)
memories = st.builds(
    Memory,
    cap=wild_ints,
    ceiling=wild_ints,
    margin=wild_ints,
    phys=st.none() | wild_ints,
    active=wild_ints,
    recent=wild_ints,
    reserved=wild_ints,
    leases=wild_ints,
    age=wild_floats,
)
models = st.builds(
    Model,
    name=st.sampled_from(["", "a", "b"]),
    weights=wild_ints,
    kv_per_token=wild_ints,
    transient=wild_ints,
    context=wild_ints,
    load_seconds=wild_floats,
    prefill_speed=wild_floats,
    decode_speed=wild_floats,
    bytes_per_token=wild_floats,
    expected_output=wild_ints,
    loading=st.booleans(),
    progress=wild_floats,
    groups=st.lists(st.builds(BatchGroup, rows=wild_ints, longest=wild_ints), max_size=3).map(tuple),
)
reports = st.builds(
    Report,
    sequence=wild_ints,
    memory=memories,
    acked_seq=wild_ints,
    models=st.lists(models, max_size=4).map(tuple),
    engine=st.builds(EngineState, running=wild_ints, waiting=wild_ints, queued_tokens=wild_ints),
    system=st.builds(
        SystemMemory, available=st.none() | wild_ints, worker=wild_ints, age=wild_floats, source=st.text()
    ),
    enforcement=st.builds(
        Enforcement,
        level=wild_ints,
        phys=st.none() | wild_ints,
        highest=wild_ints,
        interval=wild_ints,
        over_caps=wild_ints,
        kills=wild_ints,
        polls=wild_ints,
        remedy=st.text(),
        cap_bound_by=st.text(),
        warnings=st.lists(st.text(), max_size=20).map(tuple),
    ),
)


def seen(report: Report, name: str = "studio"):
    return build_node_view(report, node=NodeId("n1"), name=name, state="ready", reported_at=1.0)


@given(reports)
def test_no_lie_reaches_the_arithmetic(report: Report):
    view = seen(report)
    memory = view.memory
    assert min(memory.cap, memory.ceiling, memory.margin, memory.active, memory.recent, memory.reserved) >= 0
    assert memory.phys is None or memory.phys >= 0
    assert min(view.engine.running, view.engine.waiting, view.engine.queued_tokens, view.acked_seq) >= 0
    system, held = view.system, view.enforcement
    assert min(system.worker, held.polls, held.over_caps, held.kills, memory.cache, memory.peak) >= 0
    assert all(size is None or size >= 0 for size in (system.available, held.phys, held.highest, held.interval))
    assert math.isfinite(system.age)
    assert held.level in tuple(MemoryLevel)
    texts = (system.source, held.remedy, held.cap_bound_by, *held.warnings)
    assert all(text.isprintable() and len(text) <= 300 for text in texts)
    assert len(held.warnings) <= 8
    for model in view.models.values():
        assert model.name
        assert min(model.weights, model.kv_per_token, model.transient, model.context) >= 0
        assert all(math.isfinite(one) and one > 0 for one in (model.prefill_speed, model.decode_speed))
        assert 0 <= model.load_seconds <= 600
        assert 0 <= model.progress <= 1
        assert 0.25 <= model.bytes_per_token <= 64
        assert 0 < model.expected_output <= 32_768
        assert estimate_request_need(model, 100, 100) >= 0


SIZES = (
    "cap",
    "ceiling",
    "margin",
    "active",
    "recent",
    "reserved",
    "leases",
    "total",
    "base",
    "cache",
    "peak",
    "reserve",
)
NEGATIVE: dict[str, Any] = dict.fromkeys(SIZES, -1)
POSITIVE: dict[str, Any] = {name: 9 + place for place, name in enumerate(SIZES)}


@pytest.mark.parametrize(
    ("memory", "honest"),
    [
        (
            Memory(**NEGATIVE, phys=-1, current=-1, headroom=-1, reusable=-1, age=-0.1, source="\x1b"),
            Memory(headroom=-1, age=MAX_LOAD_SECONDS, source="?"),
        ),
        (Memory(phys=0, current=0), Memory(phys=0, current=0)),
        (
            Memory(**POSITIVE, phys=5, current=6, reusable=8, age=600.0),
            Memory(**POSITIVE, phys=5, current=6, reusable=8, age=600.0),
        ),
        (Memory(age=0.5), Memory(age=0.5)),
        (Memory(active=8, reusable=9, age=600.1), Memory(active=8, reusable=8, age=MAX_LOAD_SECONDS)),
        (Memory(age=math.nan, bound_by="a\nb\x9b"), Memory(age=MAX_LOAD_SECONDS, bound_by="a?b?")),
        (Memory(source="x" * MAX_TEXT_CHARS + "y"), Memory(source="x" * MAX_TEXT_CHARS)),
    ],
)
def test_sanitize_memory_removes_impossible_readings_only(memory: Memory, honest: Memory):
    assert sanitize_memory(memory) == honest


@pytest.mark.parametrize(
    ("age", "honest"), [(0.0, 0.0), (21.0, 21.0), (601.0, MAX_LOAD_SECONDS), (-1.0, MAX_LOAD_SECONDS)]
)
def test_an_old_reading_of_the_machine_never_looks_new(age: float, honest: float):
    assert seen(Report(0, Memory(), EngineState(), system=SystemMemory(age=age))).system.age == honest


@pytest.mark.parametrize(
    ("change", "possible"),
    [
        ({}, True),
        ({"name": "a\x1b[2J"}, False),
        ({"weights": MAX_BYTES, "kv_per_token": 0, "kv_step": MAX_KV_STEP}, True),
        ({"kv_window_per_token": MAX_BYTES + 1}, False),
        ({"transient": -1}, False),
        ({"kv_fixed": -1}, False),
        ({"kv_window": -1}, False),
        ({"kv_waste": -1}, False),
        ({"forward": TransientModel(fixed=-1)}, False),
        ({"kv_step": 0}, False),
        ({"kv_step": 1}, True),
        ({"kv_step": MAX_KV_STEP + 1}, False),
    ],
)
def test_a_model_is_seen_when_its_name_and_sizes_are_possible(change: dict[str, object], possible: bool):
    facts: dict[str, object] = {"name": "tiny"} | change
    model = Model(**facts)  # pyright: ignore[reportArgumentType]
    assert list(seen(Report(1, Memory(), EngineState(), models=(model,))).models) == ["tiny"] * possible


@given(memories)
def test_sanitized_memory_never_adds_room(memory: Memory):
    honest = seen(Report(0, memory, EngineState())).memory
    verdict = judge(honest, 1)
    if isinstance(verdict, Fits) and memory.guard:
        assert memory.ceiling >= 0
        assert memory.phys is not None
        assert memory.phys >= 0


def test_a_valid_report_is_unchanged():
    model = Model("m", "f", True, 1, 2, 3, 4096, 1.5, 800.0, 40.0, 3.9, ("tools",), (BatchGroup(2, 100, 150),), 128)
    memory = Memory(cap=10, ceiling=9, margin=1, phys=3, active=2, recent=1, reserved=1)
    view = seen(Report(1, memory, EngineState("mlx", "ready"), (model,), 7, True))
    assert (view.memory, view.models["m"], view.acked_seq, view.draining) == (memory, model, 7, True)


def test_a_model_with_an_impossible_size_is_left_out():
    bad = Model("m", kv_per_token=-5, weights=1)
    assert not seen(Report(0, Memory(), EngineState(), (bad,))).models


HONEST = Model(
    "m",
    context=4096,
    load_seconds=0.5,
    prefill_speed=0.5,
    decode_speed=0.5,
    bytes_per_token=0.25,
    loading=True,
    progress=0.5,
    groups=(BatchGroup(1, 0, 0),),
    expected_output=1,
)


@pytest.mark.parametrize(
    ("said", "honest"),
    [
        ({}, {}),
        ({"cause": "a\nb"}, {"cause": "a?b"}),
        ({"cause": "x", "loaded": True}, {"loaded": True, "loading": False, "progress": 0.0}),
        ({"loading": False}, {"loading": False, "progress": 0.0}),
        ({"loading": False, "loaded": True}, {"loading": False, "loaded": True, "progress": 0.0}),
        ({"progress": 1.0}, {"progress": 1.0}),
        ({"progress": 1.1}, {"progress": 0.0}),
        ({"progress": math.nan, "load_seconds": math.inf}, {"progress": 0.0, "load_seconds": MAX_LOAD_SECONDS}),
        ({"context": -1, "load_seconds": -1.0}, {"context": 0, "load_seconds": MAX_LOAD_SECONDS}),
        ({"load_seconds": 0.0}, {"load_seconds": 0.0}),
        ({"load_seconds": 601.0}, {"load_seconds": MAX_LOAD_SECONDS}),
        ({"context": MAX_CONTEXT + 1}, {"context": MAX_CONTEXT}),
        ({"used": 1.0, "written": 2.0}, {"used": 1.0, "written": 2.0}),
        ({"used": math.inf, "written": math.nan}, {}),
        ({"used": 0.5, "written": 0.5}, {"used": 0.5, "written": 0.5}),
        ({"fingerprint": "a\x1b", "content": "b\x1b"}, {"fingerprint": "a?", "content": "b?"}),
        ({"quantization": "4\x1b" + "b" * 30}, {"quantization": "4?" + "b" * 18}),
        ({"used": -1.0, "written": MAX_UNIX_SECONDS + 1}, {}),
        ({"expected_output": 0}, {"expected_output": 256}),
        ({"expected_output": MAX_EXPECTED_OUTPUT + 1}, {"expected_output": MAX_EXPECTED_OUTPUT}),
        ({"groups": (BatchGroup(0, 5, 0), BatchGroup(1, -1, 0), BatchGroup(1, 0, 0))}, {}),
    ],
)
def test_sanitize_report_removes_impossible_values_of_a_model_only(said: dict[str, object], honest: dict[str, object]):
    report = Report(0, Memory(), EngineState(), (replace(HONEST, **said),))
    assert seen(report).models == {"m": replace(HONEST, **honest)}


def test_the_first_of_two_models_with_one_name_counts():
    report = Report(0, Memory(), EngineState(), (Model("m", context=1), Model("m", context=2)))
    assert seen(report).models["m"].context == 1


@pytest.mark.parametrize("speed", [0.0, -1.0, math.nan, math.inf, 5e-324, math.nextafter(0.001, 0.0)])
def test_an_impossible_speed_reads_as_unmeasured(speed: float):
    report = Report(0, Memory(), EngineState(), (Model("m", prefill_speed=speed, decode_speed=speed),))
    model = seen(report).models["m"]
    assert (model.prefill_speed, model.decode_speed) == (UNMEASURED_PREFILL, UNMEASURED_DECODE) == (200.0, 20.0)


def test_a_slow_but_possible_speed_is_kept():
    report = Report(0, Memory(), EngineState(), (Model("m", prefill_speed=0.001, decode_speed=0.001),))
    model = seen(report).models["m"]
    assert (model.prefill_speed, model.decode_speed) == (0.001, 0.001)


def test_sanitize_report_replaces_an_unsafe_name_by_the_id():
    assert seen(Report(0, Memory(), EngineState()), "evil\r\nx-admin: 1").name == "n1"


def test_another_engine_process_or_link_is_another_life_of_a_node():
    def life(epoch: int, restarts: int, recycles: int, **more: object) -> int:
        engine = EngineState("x", "ready", "", restarts, recycles=recycles)
        return NodeView(NodeId("a"), "a", "ready", epoch=epoch, engine=engine, **more).engine_instance  # pyright: ignore

    lives = {life(epoch, restarts, recycles) for epoch in (1, 2) for restarts in (0, 1) for recycles in (0, 1)}
    assert len(lives) == 8
    assert life(1, 0, 0, reported_at=9.0, cordoned=True) == life(1, 0, 0), "a report is no other life"


def test_the_newest_evictions_are_read():
    hashes = tuple(bytes([number]) * 40 for number in range(MAX_EVICTIONS + 6))
    view = seen(Report(0, Memory(), EngineState(cache=CacheState(evictions=99, evicted=hashes))))
    assert view.engine.cache.evicted == tuple(one[:MAX_HASH_BYTES] for one in hashes[6:])
    assert view.engine.cache.evictions == 99


def test_the_disk_and_the_illegal_events_of_a_report_are_passed_on():
    view = seen(Report(0, Memory(), EngineState(), illegal_events=3, disk=Disk(5, 9, "/cache\n")))
    assert (view.illegal_events, view.disk) == (3, Disk(5, 9, "/cache?"))


def test_a_lease_has_possible_numbers_and_a_printable_job():
    lease = LeaseState("l1", 1, "job\n", -5, "denoising\n", 250, -1, -2, -3, 2**62)
    (found,) = sanitize_video(VideoState(leases=(lease, replace(lease, lease="no lease")))).leases
    assert found == LeaseState("l1", 1, "job?", 0, "denoising?", 100, 0, 0, 0, MAX_BYTES)


def fill(kind: type[Any], number: int, **known: object) -> Any:
    """Build a struct in which each number, text and flag with a default has a value of its own.

    `known` has the values of further fields. A negative `number` makes all numbers negative and all texts unprintable.
    """
    values: dict[str, object] = dict(known)
    for at, info in enumerate(msgspec.structs.fields(kind)):
        size = number + at if number > 0 else number - at
        default = info.default
        if info.name in values:
            continue
        if isinstance(default, bool):
            values[info.name] = not default
        elif isinstance(default, int | float):
            values[info.name] = type(default)(size)
        elif isinstance(default, str):
            values[info.name] = f"word-{at}" if number > 0 else f"word-{at}\n"
        elif isinstance(default, msgspec.Struct):
            values[info.name] = fill(type(default), size)
    return kind(**values)


def list_values(part: object) -> list[object]:
    """Return all values in a struct, and in the structs within it."""
    if not isinstance(part, msgspec.Struct):
        return [part]
    return [value for inner in msgspec.structs.astuple(part) for value in list_values(inner)]


PACKAGE = VideoPackage("wan", "f1", "wan21", "mlx", 4, 5, 6, 1, 16, 4, 16, 40, 81, "no memory")


def test_every_value_of_a_report_reaches_the_view():
    cache = fill(CacheState, 100, models=(fill(ModelCache, 500),), evicted=(b"one", b"two"))
    engine = fill(EngineState, 300, cache=cache)
    system, disk = fill(SystemMemory, 10, available=9), fill(Disk, 20)
    enforcement = fill(Enforcement, 30, level=list(MemoryLevel)[-1], phys=1, highest=2, interval=3, warnings=("hot",))
    sharing = fill(Sharing, 40, when="idle", until=1.5e9)
    lease = fill(LeaseState, 50, lease="l1", generation=1)
    video = VideoState(True, "none", "2.9", (PACKAGE,), (lease,), "late", True)
    report = Report(
        0,
        Memory(),
        engine,
        (),
        7,
        True,
        system=system,
        enforcement=enforcement,
        video=video,
        sharing=sharing,
        disk=disk,
    )
    view = build_node_view(
        report,
        node=NodeId("n1"),
        name="studio",
        state="ready",
        reported_at=1.0,
        cordoned=True,
        epoch=3,
        labels=frozenset({"lab"}),
        video_allowed=True,
        frames=frozenset({4}),
        awaited=True,
    )
    assert (view.engine, view.system, view.enforcement) == (engine, system, enforcement)
    assert (view.sharing, view.video, view.disk, view.acked_seq, view.draining) == (sharing, video, disk, 7, True)
    assert (view.name, view.cordoned, view.epoch, view.labels) == ("studio", True, 3, {"lab"})
    assert (view.video_allowed, view.frames, view.awaited, view.reported_at) == (True, {4}, True, 1.0)


def test_no_number_of_a_report_is_negative_and_no_text_is_unprintable():
    cache = fill(CacheState, -100, models=(fill(ModelCache, -500),), evicted=(b"one",))
    lease = fill(LeaseState, -50, lease="l1", generation=1)
    packages = (
        msgspec.structs.replace(PACKAGE, engine="x\n", pipeline="x\n", fingerprint="x\n", cause="x\n", bits=-1),
    )
    view = seen(
        Report(
            0,
            Memory(),
            fill(EngineState, -300, cache=cache),
            (),
            -7,
            system=fill(SystemMemory, -10, available=-9),
            enforcement=fill(Enforcement, -30, level=-30, phys=-1, highest=-2, interval=-3, warnings=("x\n",)),
            video=VideoState(True, "x\n", "x y", packages, (lease,), "x\n", None),
            sharing=fill(Sharing, -40, until=-1.0),
        )
    )
    assert (view.video.ray, view.sharing.until, view.acked_seq) == ("", None, 0)
    parts = [view.engine, view.system, view.enforcement, view.sharing, view.video, *view.video.packages]
    parts += [*view.video.leases, *view.engine.cache.models]
    values = [value for part in parts for value in list_values(part)]
    assert [value for value in values if isinstance(value, int | float) and value < 0] == []
    assert [value for value in values if isinstance(value, str) and not value.isprintable()] == []
    counts = [value for part in (view.engine, *view.engine.cache.models) for value in list_values(part)]
    assert {value for value in counts if isinstance(value, int)} == {0}
    (lease,), (package,) = view.video.leases, view.video.packages
    assert (lease.progress, lease.peak, package.bits, view.system.worker) == (0, 0, 0, 0)
    assert (view.enforcement.polls, view.enforcement.over_caps, view.enforcement.kills) == (0, 0, 0)


def test_long_texts_of_a_report_are_cut():
    long = "x" * 60
    video = VideoState(packages=(replace(PACKAGE, engine=long),), leases=(LeaseState("l1", 1, phase=long),))
    view = seen(Report(0, Memory(), EngineState(), video=video, sharing=Sharing(when=long, until=0.5)))
    assert (view.video.packages[0].engine, view.video.leases[0].phase) == (long[:40], long[:40])
    assert (view.sharing.when, view.sharing.until) == (long[:20], 0.5)


@pytest.mark.parametrize(
    ("change", "possible"),
    [
        ({}, True),
        ({"name": "a\nb"}, False),
        ({"token_side": 8}, True),
        ({"token_side": 7}, False),
        ({"token_side": 1025}, False),
        ({"token_side": 1024}, True),
        ({"token_frames": 0}, False),
        ({"token_frames": 1}, True),
        ({"token_frames": 64}, True),
        ({"token_frames": 65}, False),
        ({"fps": 0}, False),
        ({"fps": 1}, True),
        ({"weights": 0, "expert": 0}, True),
        ({"fps": 1000}, True),
        ({"fps": 1001}, False),
        ({"weights": -1}, False),
        ({"expert": MAX_BYTES + 1}, False),
        ({"expert": MAX_BYTES}, True),
    ],
    ids=str,
)
def test_a_video_package_is_seen_when_its_sizes_are_possible(change: dict[str, Any], possible: bool):
    found = sanitize_video(VideoState(packages=(msgspec.structs.replace(PACKAGE, **change),))).packages
    assert bool(found) is possible
