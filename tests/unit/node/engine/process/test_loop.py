import threading
import time
from collections.abc import Callable, Iterator, Sequence
from queue import Queue
from typing import cast

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from node.engine.build import compose
from node.engine.process import loop as engine_loop
from node.engine.process.crash_recorder import CrashRecord, CrashRecorder
from node.engine.process.interface import Engine, Halted, NativeCall, NativeCallKind, Work
from node.engine.process.loop import (
    STEP_REPORT_INTERVAL_SECONDS,
    TOKENIZE_EXPECTED_SECONDS,
    TOKENIZE_TIMEOUT_SECONDS,
    EngineLoop,
)
from node.engine.requests.tokenize_admission import LONG_PROMPT_BYTES, TokenizeResult, UntokenizedPrompt
from node.engine.scripted.engine import ScriptedEngine
from node.models.catalogue import ModelCatalogue
from node.settings import EngineSettings, ModelSettings, NodeSettings, ScriptedSettings
from tests import models
from wire.frames import (
    Admitted,
    Cancel,
    Deltas,
    EngineReport,
    Failed,
    Finished,
    Frame,
    Generate,
    GenerationParams,
    LoadModel,
    MemoryLimits,
    Message,
    Refusal,
    UnloadModel,
)
from wire.refusals import RefusalCode, Refused
from wire.report import Hardware
from wire.units import GIB

LIMITS = MemoryLimits(96 * GIB, 96 * GIB, 2 * GIB, "metal")
WAIT = 10.0


class Running:
    """A loop on its own thread, with its frames and their times."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.sent: Queue[tuple[float, Frame]] = Queue()
        self.loop = EngineLoop(self.engine, self._keep)
        self.thread = threading.Thread(target=self.loop.run)
        self.thread.start()
        threading.Thread(target=self.loop.tokenize_prompts, daemon=True).start()

    def _keep(self, frames: Sequence[Frame]) -> None:
        for frame in frames:
            self.sent.put((time.monotonic(), frame))

    def until(self, wanted: Callable[[Frame], bool]) -> list[tuple[float, Frame]]:
        seen: list[tuple[float, Frame]] = []
        while not seen or not wanted(seen[-1][1]):
            seen.append(self.sent.get(timeout=WAIT))
        return seen

    def stop(self) -> None:
        self.loop.stop()
        self.thread.join(WAIT)
        assert not self.thread.is_alive()


@pytest.fixture
def running() -> Iterator[Running]:
    made = Running(ScriptedEngine(ScriptedSettings(step_ms=10), CrashRecorder()))
    yield made
    made.stop()


@pytest.fixture
def loading() -> Iterator[Running]:
    """Yield a loop with a real engine that has no model in memory yet."""
    folders = (str(models.path("llama")),)
    settings = NodeSettings(
        engine=EngineSettings(kind="mlx"),
        models=ModelSettings(folders=folders, use_huggingface_cache=False, profile="off", trial=False),
    )
    catalogue = ModelCatalogue(settings.models)
    catalogue.scan()
    made = Running(compose(settings, catalogue, CrashRecorder(), Hardware("test", 16 * GIB), None))
    yield made
    made.stop()


def generate(number: int, tokens: int, model: str = "scripted-1") -> Generate:
    return Generate(number, number, "r", model, (Message("user", "hi"),), GenerationParams(max_tokens=tokens), 0)


def resting(frame: Frame) -> bool:
    return isinstance(frame, EngineReport) and frame.running == 0 and frame.acked_seq > 0


def test_it_publishes_at_the_start_and_when_limits_come(running: Running):
    first = running.until(lambda frame: isinstance(frame, EngineReport))[-1][1]
    assert isinstance(first, EngineReport)
    assert not first.memory.armed
    running.loop.put(LIMITS)
    armed = running.until(lambda frame: isinstance(frame, EngineReport) and frame.memory.armed)[-1][1]
    assert isinstance(armed, EngineReport)
    assert armed.memory.ceiling == 96 * GIB


def test_steps_come_at_their_pace_and_snapshots_at_most_four_a_second(running: Running):
    running.loop.put(LIMITS)
    running.loop.put(generate(1, 60))
    seen = running.until(resting)
    steps = [when for when, frame in seen if isinstance(frame, Deltas)]
    assert len(steps) == 60
    assert steps[-1] - steps[0] == pytest.approx(0.59, abs=0.1)
    published = [when for when, frame in seen if isinstance(frame, EngineReport)]
    assert len(published) >= 4
    assert len(published) <= (published[-1] - published[0]) / STEP_REPORT_INTERVAL_SECONDS + 3


def test_a_frame_during_steps_is_reported_before_the_next_report_of_steps(
    running: Running, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(engine_loop, "STEP_REPORT_INTERVAL_SECONDS", 2 * WAIT)
    running.loop.put(LIMITS)
    running.loop.put(generate(1, 10_000))
    running.until(lambda frame: isinstance(frame, Deltas))
    running.loop.put(replace(LIMITS, ceiling=90 * GIB))
    running.until(lambda frame: isinstance(frame, EngineReport) and frame.memory.ceiling == 90 * GIB)


def test_frames_of_one_step_are_sent_together():
    engine, sent = ScriptedEngine(ScriptedSettings(step_ms=0), CrashRecorder()), Queue[Sequence[Frame]]()
    loop = EngineLoop(engine, sent.put)
    thread = threading.Thread(target=loop.run)
    thread.start()
    loop.put(LIMITS)
    loop.put(generate(1, 1))
    together = sent.get(timeout=WAIT)
    while not any(isinstance(frame, Finished) for frame in together):
        together = sent.get(timeout=WAIT)
    assert [type(frame) for frame in together] == [Deltas, Finished]
    loop.stop()
    thread.join(WAIT)


def test_admissions_of_several_requests_are_sent_together_before_the_next_step():
    engine, sent = ScriptedEngine(ScriptedSettings(step_ms=400), CrashRecorder()), Queue[Sequence[Frame]]()
    loop = EngineLoop(engine, sent.put)
    loop.put(LIMITS)
    for number in (1, 2, 3):
        loop.put(generate(number, 1))
    thread = threading.Thread(target=loop.run)
    thread.start()
    writes = [sent.get(timeout=WAIT)]
    while not any(isinstance(frame, Deltas) for frame in writes[-1]):
        writes.append(sent.get(timeout=WAIT))
    admitted = [[frame.request for frame in frames if isinstance(frame, Admitted)] for frames in writes]
    assert [numbers for numbers in admitted if numbers] == [[1, 2, 3]]
    assert not admitted[-1]
    loop.stop()
    thread.join(WAIT)


def test_an_admission_without_a_step_or_report_is_sent_soon(running: Running, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_loop, "MIN_REPORT_INTERVAL_SECONDS", 2 * WAIT)
    monkeypatch.setattr(engine_loop, "STEP_REPORT_INTERVAL_SECONDS", 2 * WAIT)
    running.loop.put(LIMITS)
    running.loop.put(generate(1, 10_000))
    running.until(lambda frame: isinstance(frame, Deltas))
    running.engine.next_step_at = lambda now: now + 2 * WAIT
    running.loop.put(generate(2, 1))
    running.until(lambda frame: isinstance(frame, Admitted) and frame.request == 2)


def test_a_report_shows_a_model_before_the_answers_of_the_request_that_loads_it(loading: Running):
    (model,) = (name.name for name in loading.engine.report(time.monotonic()).models)
    loading.loop.put(LIMITS)
    work = loading.engine.prepare(generate(1, 1, model))
    assert work is not None
    loading.loop.put(work)
    seen = [frame for _, frame in loading.until(lambda frame: isinstance(frame, Admitted))]
    reports = [frame for frame in seen if isinstance(frame, EngineReport)]
    assert [one.loaded for one in reports[-1].models] == [True]


def test_a_cancel_while_it_decodes_ends_it_without_a_word(running: Running):
    running.loop.put(LIMITS)
    running.loop.put(generate(1, 10_000))
    running.until(lambda frame: isinstance(frame, Deltas))
    running.loop.put(Cancel(1))
    seen = running.until(resting)
    assert not any(isinstance(frame, Finished) for _, frame in seen)


def test_resting_it_is_not_busy_and_does_not_wake(running: Running):
    running.loop.put(LIMITS)
    running.until(lambda frame: isinstance(frame, EngineReport) and frame.memory.armed)
    assert running.loop.measure_busy_seconds(time.monotonic()) == (0.0, 0.0)
    turns = threading.Event()
    due = running.engine.next_step_at

    def counted(now: float) -> float | None:
        turns.set()
        return due(now)

    running.engine.next_step_at = counted
    assert not turns.wait(0.5)


class Stuck(ScriptedEngine):
    """An engine whose step never ends, like a native call that hangs."""

    def __init__(self) -> None:
        super().__init__(ScriptedSettings(), CrashRecorder())
        self.inside = threading.Event()
        self.release = threading.Event()

    def step(self, now: float) -> list[list[Frame]]:
        self.inside.set()
        self.release.wait(WAIT)
        return super().step(now)


def test_the_busy_time_of_a_native_call_is_its_own_with_the_expected_one():
    engine = Stuck()
    loop = EngineLoop(engine, lambda frames: None)
    engine.read_running_call = lambda: NativeCall("prefill", 100.0, 7.0)
    assert loop.measure_busy_seconds(103.0) == (3.0, 7.0)


def test_the_busy_time_of_a_hanging_turn_is_its_length():
    engine = Stuck()
    loop = EngineLoop(engine, lambda frames: None)
    thread = threading.Thread(target=loop.run)
    thread.start()
    loop.put(LIMITS)
    loop.put(generate(1, 5))
    assert engine.inside.wait(WAIT)
    busy, expected = loop.measure_busy_seconds(time.monotonic() + 30.0)
    assert busy >= 30.0
    assert expected == 0.0
    loop.stop()
    engine.release.set()
    thread.join(WAIT)


@pytest.mark.parametrize(
    ("since", "busy"), [(699.0, (TOKENIZE_TIMEOUT_SECONDS + 1, TOKENIZE_EXPECTED_SECONDS)), (700.0, (0.0, 0.0))]
)
def test_a_tokenization_that_hangs_counts_as_busy(since: float, busy: tuple[float, float]):
    record = CrashRecord(NativeCallKind.READ, 1, "m", since)
    engine = ScriptedEngine(ScriptedSettings(), CrashRecorder())
    loop = EngineLoop(engine, lambda frames: None, lambda: record)
    assert loop.measure_busy_seconds(700.0 + TOKENIZE_TIMEOUT_SECONDS) == busy


class Answering(ScriptedEngine):
    """An engine that answers by script, and whose reports count its calls of `handle`."""

    def __init__(self, *, changes: bool = True) -> None:
        super().__init__(ScriptedSettings(), CrashRecorder())
        self.handled: list[Work] = []
        self.tokenized_by: list[tuple[int, str]] = []
        self.error: BaseException | None = None
        self._changes = changes

    def handle(self, work: Work, now: float) -> list[Frame]:
        self.handled.append(work)
        if self.error is not None:
            raise self.error
        if isinstance(work, LoadModel | UnloadModel):
            return [Failed(work.request, "failed", "by script")]
        if isinstance(work, Generate):
            return [cast("Frame", UntokenizedPrompt(work, 0, lambda: self._tokenize(work.request)))]
        if isinstance(work, TokenizeResult):
            return [Failed(work.request, "failed", "tokenized")]
        return []

    def _tokenize(self, number: int) -> TokenizeResult:
        self.tokenized_by.append((number, threading.current_thread().name))
        return TokenizeResult(number, Refusal(number, Refused(RefusalCode.INVALID, "by script")))

    def report(self, now: float) -> EngineReport:
        return replace(super().report(0.0), acked_seq=len(self.handled) if self._changes else 0)


def run_to_end(engine: ScriptedEngine, *work: Work, until: Callable[[list[Frame]], bool]) -> list[list[Frame]]:
    """Pass work to a loop one by one, and stop the loop once its frames are complete. Return its writes."""
    writes = Queue[Sequence[Frame]]()
    loop, sent = EngineLoop(engine, writes.put), list[list[Frame]]()
    threads = [
        threading.Thread(target=target, name=name, daemon=True)
        for target, name in (
            (loop.run, "inference"),
            (loop.tokenize_prompts, "short"),
            (loop.tokenize_long_prompts, "long"),
        )
    ]
    for thread in threads:
        thread.start()
    for piece in work:
        loop.put(piece)
    while not until([frame for frames in sent for frame in frames]):
        sent.append(list(writes.get(timeout=WAIT)))
    loop.stop()
    threads[0].join(WAIT)
    assert not threads[0].is_alive()
    return sent


@pytest.mark.parametrize("command", [LoadModel(7, "m"), UnloadModel(7, "m")])
def test_the_end_of_a_load_or_unload_follows_a_report_of_the_models(command: Work, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_loop, "MIN_REPORT_INTERVAL_SECONDS", 2 * WAIT)
    sent = run_to_end(Answering(), command, until=lambda frames: any(isinstance(one, Failed) for one in frames))
    frames = [frame for frames in sent for frame in frames]
    place = next(place for place, frame in enumerate(frames) if isinstance(frame, Failed))
    before = frames[place - 1]
    assert isinstance(before, EngineReport)
    assert before.acked_seq == 1


def test_an_equal_report_is_not_sent_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_loop, "MIN_REPORT_INTERVAL_SECONDS", 0.0)
    work = (LIMITS, LIMITS, LoadModel(1, "m"), LoadModel(2, "m"))
    done = lambda frames: sum(isinstance(one, Failed) for one in frames) == 2  # noqa: E731
    sent = run_to_end(Answering(changes=False), *work, until=done)
    assert sum(isinstance(frame, EngineReport) for frames in sent for frame in frames) == 1


def test_long_prompts_have_a_thread_of_their_own():
    engine = Answering()
    long = replace(generate(2, 1), messages=(Message("user", "x" * (LONG_PROMPT_BYTES + 1)),))
    work = (generate(1, 1), long, generate(3, 1))
    done = lambda frames: sum(isinstance(one, Failed) for one in frames) == 3  # noqa: E731
    run_to_end(engine, *work, until=done)
    assert sorted(engine.tokenized_by) == [(1, "short"), (2, "long"), (3, "short")]


def test_a_halt_ends_the_loop_and_other_errors_propagate():
    engine = Answering()
    loop = EngineLoop(engine, lambda frames: None)
    loop.put(LIMITS)
    engine.error = Halted()
    loop.run()
    engine.error = RuntimeError("broken")
    loop.put(LIMITS)
    with pytest.raises(RuntimeError, match="broken"):
        loop.run()


def test_work_is_handled_in_its_order():
    engine = Answering()
    work = [LoadModel(number, "m") for number in range(1, 6)]
    sent = run_to_end(engine, *work, until=lambda frames: sum(isinstance(one, Failed) for one in frames) == 5)
    assert [frame.request for frames in sent for frame in frames if isinstance(frame, Failed)] == [1, 2, 3, 4, 5]
    assert engine.handled == work


def test_the_settings_of_the_guard_are_logged_once_for_each_change(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_loop, "MIN_REPORT_INTERVAL_SECONDS", 0.0)
    engine = ScriptedEngine(ScriptedSettings(), CrashRecorder())
    loads = [LoadModel(number, "other") for number in (1, 2, 3)]
    work = (LIMITS, loads[0], loads[1], replace(LIMITS, margin=GIB), loads[2])
    done = lambda frames: sum(isinstance(one, Refusal) for one in frames) == 3  # noqa: E731
    with capture_logs() as logs:
        run_to_end(engine, *work, until=done)
    margins = [entry["margin"] for entry in logs if entry["event"] == "gate"]
    assert len(margins) == len(set(map(str, margins))) <= 2
    assert margins


def test_a_stop_halts_the_engine_before_its_next_call():
    engine, halted = ScriptedEngine(ScriptedSettings(), CrashRecorder()), threading.Event()
    engine.halt = halted.set
    loop = EngineLoop(engine, lambda frames: None)
    loop.stop()
    assert halted.is_set()
    loop.put(LIMITS)
    loop.run()
