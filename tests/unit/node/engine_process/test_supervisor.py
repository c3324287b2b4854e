"""The supervisor with the real engine process, and with small programs in its place for faults."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil
import pytest
from structlog.testing import capture_logs

from node.engine_process.supervisor import MAX_UNSENT_BYTES, Supervisor
from node.engine_process.timeouts import SupervisorTimeouts
from node.illegal_events import IllegalEvents
from node.settings import NodeSettings, resolve_settings
from tests import models
from tests.support.processes import until
from wire.codec import MAX_JOINED_BYTES, decode, decode_request_number, encode
from wire.frames import (
    Admitted,
    Cancel,
    Deltas,
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
from wire.refusals import FailureCode, RefusalCode
from wire.report import CacheState
from wire.units import GIB, MIB

LIMITS = MemoryLimits(96 * GIB, 96 * GIB, 2 * GIB, "metal")
WAIT = 60.0
QUICK = SupervisorTimeouts(ping_busy=0.05, ping_idle=0.05, turn=0.5, silence=0.5, leave=0.3)


class Agent:
    """The agent's side of a supervisor: keeps every frame, decoded."""

    def __init__(
        self, folder: Path, patience: SupervisorTimeouts | None, command: list[str] | None, **settings: object
    ) -> None:
        named = {key if "." in key else f"engine.scripted.{key}": value for key, value in settings.items()}
        flat = {"engine.kind": "scripted"} | named
        self.settings: NodeSettings = resolve_settings([("test", flat)]).value
        self.frames: list[tuple[Frame, int]] = []
        self.states: list[str] = []
        self._changed = asyncio.Event()
        self.log_file = folder / "logs" / "engine.log"
        self.wired: int | None = None
        self.illegal_events = IllegalEvents()
        instead = {"command": command} if command else {}
        self.supervisor = Supervisor(
            self.settings,
            on_frame=self._frame,
            on_change=self._change,
            log_file=self.log_file,
            scratch=folder / "scratch",
            wired=lambda: self.wired,
            illegal_events=self.illegal_events,
            timeouts=patience,
            **instead,
        )

    def _frame(self, tag: int, encoded: bytes, request: int) -> None:
        assert encoded[4] == tag
        frame = decode(tag, encoded[5:])
        assert encode(frame) == encoded
        assert request == (0 if isinstance(frame, Deltas) else decode_request_number(encoded[5:]))
        self.frames.append((frame, request))
        self._changed.set()

    def _change(self) -> None:
        state = self.supervisor.state.state
        if self.states[-1:] != [state]:
            self.states.append(state)
        self._changed.set()

    async def until(self, wanted: Callable[[], object]) -> None:
        async with asyncio.timeout(WAIT):
            while not wanted():
                self._changed.clear()
                await self._changed.wait()

    async def ready(self) -> None:
        self.supervisor.orders.set_limits(LIMITS)
        await self.until(lambda: self.armed())

    def armed(self) -> bool:
        report = self.supervisor.reports.latest
        return report is not None and report.memory.armed

    def generate(self, number: int, content: str = "hi", tokens: int = 16) -> None:
        frame = Generate(
            number, number, "r", "scripted-1", (Message("user", content),), GenerationParams(max_tokens=tokens), 0
        )
        self.supervisor.send(encode(frame), Generate, number)

    def ends(self, number: int) -> list[Frame]:
        kinds = (Finished, Refusal, Failed)
        return [frame for frame, request in self.frames if request == number and isinstance(frame, kinds)]

    async def end(self, number: int) -> Frame:
        await self.until(lambda: self.ends(number))
        (end,) = self.ends(number)
        return end


@pytest.fixture
async def agent(tmp_path: Path) -> AsyncIterator[Callable[..., Agent]]:
    made: list[Agent] = []

    def make(patience: SupervisorTimeouts | None = None, command: list[str] | None = None, **settings: object) -> Agent:
        made.append(Agent(tmp_path, patience, command, **settings))
        return made[-1]

    yield make
    for one in made:
        await one.supervisor.stop()
        assert one.illegal_events.count == 0, "each is a bug"


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_the_state_has_the_maximum_rows_of_a_batch(agent: Callable[..., Agent]):
    settings = {"engine.mlx.max_batch_size": 7, "engine.scripted.max_batch_size": 5}
    assert agent(**settings).supervisor.state.rows == 5
    assert agent(**settings, **{"engine.kind": "mlx"}).supervisor.state.rows == 7


async def test_before_it_starts_requests_are_refused_and_stopping_is_nothing(agent: Callable[..., Agent]):
    one = agent()
    one.generate(1)
    end = await one.end(1)
    assert isinstance(end, Refusal)
    assert end.refused.code is RefusalCode.NOT_READY
    assert end.refused.retry_after == 1.2, "a second after the first restart"
    assert one.supervisor.probe.read_footprint().phys is None
    assert one.supervisor.live == frozenset()
    one.supervisor.end("it is over its cap")
    assert (one.illegal_events.count, one.supervisor.resting, one.supervisor.warnings) == (0, False, ())
    one.supervisor.release_memory()
    assert one.supervisor.resting
    one.supervisor.wake()
    assert not one.supervisor.resting


async def test_an_engine_whose_log_cannot_be_opened_is_not_started(agent: Callable[..., Agent]):
    one = agent()
    one.log_file.parent.write_text("a file in the place of the folder")
    with pytest.raises(OSError, match="logs"):
        await one.supervisor.start()
    assert one.supervisor.child is None


@pytest.mark.slow
async def test_a_request_is_served_and_the_snapshot_kept(agent: Callable[..., Agent]):
    one = agent(step_ms=5)
    await one.supervisor.start()
    await one.ready()
    one.generate(1)
    assert one.supervisor.live == {1}
    end = await one.end(1)
    assert isinstance(end, Finished)
    assert end.completion_tokens == 16
    assert isinstance(one.frames[0][0], Admitted)
    assert sum(isinstance(frame, Deltas) for frame, _ in one.frames) == 16
    assert one.supervisor.live == frozenset()
    await one.until(lambda: one.supervisor.reports.latest and one.supervisor.reports.latest.acked_seq == 1)
    state = one.supervisor.state
    assert (state.kind, state.state, state.cause, state.restarts) == ("scripted", "ready", "", 0)
    assert one.states == ["starting", "ready"]
    assert one.supervisor.reports.received_at is not None
    reading = one.supervisor.probe.read_footprint()
    assert reading.phys is not None
    assert reading.phys < 200 * 2**20


@pytest.mark.slow
async def test_a_crash_fails_open_requests_with_a_cause_and_the_next_one_is_served(agent: Callable[..., Agent]):
    one = agent(crash="boom", step_ms=5)
    await one.supervisor.start()
    await one.ready()
    one.generate(1, tokens=10_000)
    one.generate(2, tokens=10_000)
    await one.until(lambda: any(isinstance(frame, Deltas) for frame, _ in one.frames))
    one.supervisor.send(encode(Cancel(2)), Cancel, 2)
    one.generate(3, "boom")
    for number, code in {1: FailureCode.ENGINE_LOST, 3: FailureCode.ENGINE_CRASHED}.items():
        end = await one.end(number)
        assert isinstance(end, Failed)
        assert end.code == code, "only what was in the forward is blamed"
        assert "prefill of scripted-1" in end.message
        assert "SIGABRT" in end.message
        assert "engine.scripted.crash" in end.message
    assert one.ends(2) == []
    assert one.supervisor.state.state == "restarting"
    assert "SIGABRT" in one.supervisor.state.cause
    assert one.supervisor.probe.read_footprint().phys is None
    assert one.supervisor.reports.latest is None
    one.generate(4)
    refused = await one.end(4)
    assert isinstance(refused, Refusal)
    assert refused.refused.code is RefusalCode.NOT_READY
    assert "SIGABRT" in refused.refused.message
    await one.until(one.armed)
    one.generate(5)
    assert isinstance(await one.end(5), Finished)
    assert one.supervisor.state.restarts == 1
    assert one.states == ["starting", "ready", "restarting", "starting", "ready"]


@pytest.mark.slow
async def test_a_child_that_was_killed_is_replaced_and_keeps_its_limits(agent: Callable[..., Agent]):
    one = agent()
    await one.supervisor.start()
    await one.ready()
    one.generate(1, tokens=10_000)
    pid = one.supervisor.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    end = await one.end(1)
    assert isinstance(end, Failed)
    assert end.message == "the engine process ended by SIGKILL"
    await one.until(one.armed)
    assert one.supervisor.pid != pid


@pytest.mark.slow
async def test_new_limits_are_confirmed_by_the_next_report(agent: Callable[..., Agent]):
    one = agent()
    await one.supervisor.start()
    await one.ready()
    one.supervisor.orders.set_limits(MemoryLimits(96 * GIB, 60 * GIB, 2 * GIB, "leases", leases=36 * GIB))
    await one.until(lambda: one.supervisor.reports.latest and one.supervisor.reports.latest.memory.ceiling == 60 * GIB)
    assert one.supervisor.reports.latest
    assert one.supervisor.reports.latest.memory.leases == 36 * GIB


@pytest.mark.slow
async def test_stopping_ends_the_child_and_what_was_open_and_leaves_nothing(agent: Callable[..., Agent]):
    one = agent()
    others = set(psutil.Process().children())  # a fixture of the whole session may have processes
    await one.supervisor.start()
    await one.ready()
    one.generate(1, tokens=10_000)
    pid = one.supervisor.pid
    assert pid is not None
    begun = time.monotonic()
    await one.supervisor.stop()
    assert time.monotonic() - begun < 5.0
    assert not psutil.pid_exists(pid)
    end = await one.end(1)
    assert isinstance(end, Failed)
    assert end.code == FailureCode.NODE_STOPPING
    assert one.supervisor.pid is None
    assert set(psutil.Process().children()) <= others
    assert asyncio.all_tasks() == {asyncio.current_task()}
    one.generate(2)
    assert isinstance(await one.end(2), Refusal)
    await one.supervisor.stop()


@pytest.mark.slow
async def test_the_engines_stderr_is_in_a_private_file_that_stays_short(
    agent: Callable[..., Agent], monkeypatch: pytest.MonkeyPatch
):
    one = agent(replace(QUICK, silence=WAIT))
    await one.supervisor.start()
    await one.ready()
    assert one.log_file.stat().st_mode & 0o777 == 0o600
    written = one.log_file.read_text()
    assert "gate" in written
    monkeypatch.setattr("node.engine_process.stderr_log.MAX_LOG_BYTES", len(written) // 2)
    async with asyncio.timeout(WAIT):
        while one.log_file.stat().st_size:  # noqa: ASYNC110 the log is looked at with each ping
            await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_an_engine_whose_log_cannot_be_written_serves_requests_and_ends(
    agent: Callable[..., Agent], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # then the end flushes events that were not written
    one = agent()
    one.log_file.parent.mkdir()
    one.log_file.symlink_to("/dev/full")
    await one.supervisor.start()
    await one.ready()
    one.generate(1)
    assert isinstance(await one.end(1), Finished)
    with capture_logs() as logs:
        await one.supervisor.stop()
    assert logs == [], "the engine has ended by itself"


@pytest.mark.slow
async def test_a_child_that_answers_nothing_at_all_is_hung_and_replaced(agent: Callable[..., Agent]):
    one = agent(replace(QUICK, silence=3.0))  # a start counts as silence, and takes a second on a busy machine
    await one.supervisor.start()
    await one.ready()
    one.generate(1, tokens=10_000)
    pid = one.supervisor.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    end = await one.end(1)
    assert isinstance(end, Failed)
    assert "hung" in end.message
    await one.until(one.armed)
    assert "hung" in one.states


def program(text: str) -> list[str]:
    """Return the command of a small program in the engine's place: `line` is its socket, `child` the real module.
    `settings` are those of the agent."""
    head = """
        import os, socket, sys, time
        from node.engine.process import main as child
        from wire.codec import Splitter, decode, encode
        from wire.frames import *
        from wire.report import Memory, Model
        line = socket.socket(fileno=int(sys.argv[-1]))
        settings = child.read_settings(line)
    """
    return [sys.executable, "-c", textwrap.dedent(head) + textwrap.dedent(text)]


def engine(folder: Path, text: str) -> list[str]:
    """Return the command of a program in the engine's place.

    After its RestoreModels the program has `models` loaded; one with the name `slow` is loading instead. It runs `text`
    for every frame. After each MemoryLimits it writes a line to the file `diary`: the models to restore and the models
    to keep out. `recorder` writes the shared page.
    """
    head = f"""
        from node.engine.process.interface import NativeCallKind
        from node.engine.process.crash_recorder import CrashRecorder
        recorder = CrashRecorder(int(sys.argv[-3]))
        diary = open({str(folder / "diary")!r}, "a")
        models = {{}}
        told = RestoreModels()
        splitter = Splitter()

        missing = 0

        def report():
            memory = Memory(cap=1, armed=True)
            line.sendall(encode(EngineReport(memory, tuple(models.values()), 0, 0, unreturned=missing)))

        def frames():
            while data := line.recv(65536):
                for tag, body in splitter.feed(data):
                    yield decode(tag, body)
            sys.exit(0)

        for frame in frames():
            if isinstance(frame, Ping):
                line.sendall(encode(Pong(frame.nonce)))
            elif isinstance(frame, RestoreModels):
                told = frame
                models = {{name: Model(name, loaded=name != "slow", loading=name == "slow") for name in frame.models}}
            elif isinstance(frame, MemoryLimits):
                print(",".join(told.models), "|", ",".join(ban.model for ban in told.bans), file=diary, flush=True)
                report()
            elif isinstance(frame, LoadModel):
                models[frame.model] = Model(frame.model, loaded=True)
                report()
                line.sendall(encode(Finished(frame.request, (), 0, 0)))
            elif isinstance(frame, UnloadModel):
                del models[frame.model]
                report()
                line.sendall(encode(Finished(frame.request, (), 0, 0)))
    """
    whole = program(head)
    whole[-1] += textwrap.indent(textwrap.dedent(text), "    ")
    return whole


def diary(folder: Path) -> list[tuple[str, str]]:
    """Return the orders of each life of the engine: models to restore, models to keep out."""
    lines = (folder / "diary").read_text().splitlines() if (folder / "diary").exists() else []
    return [(models.strip(), bans.strip()) for models, _, bans in (line.partition("|") for line in lines)]


async def order(one: Agent, kind: type[LoadModel] | type[UnloadModel], number: int, model: str) -> None:
    """Send an order and wait until it is done and reported."""
    one.supervisor.send(encode(kind(number, model)), kind, number)
    assert isinstance(await one.end(number), Finished)
    await one.until(
        lambda: (
            one.supervisor.reports.latest
            and (kind is LoadModel) == any(m.name == model and m.loaded for m in one.supervisor.reports.latest.models)
        )
    )


async def die(one: Agent) -> None:
    pid = one.supervisor.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await one.until(lambda: one.supervisor.pid not in (pid, None) and one.armed())


LEAKS = """
    if isinstance(frame, UnloadModel) and not models:
        missing = 200 * 2**20
        report()
"""
NEVER = SupervisorTimeouts(first=600.0, longest=600.0)
"""Timeouts under which no new engine starts after a crash during a test."""


def recycled(one: Agent) -> bool:
    return one.supervisor.state.recycles > 0 and one.supervisor.ready is not None


@pytest.mark.slow
async def test_an_engine_that_does_not_return_its_memory_is_replaced_without_blame(
    agent: Callable[..., Agent], tmp_path: Path
):
    one = agent(NEVER, engine(tmp_path, LEAKS))
    await one.supervisor.start()
    await one.ready()
    first = one.supervisor.pid
    await order(one, LoadModel, 1, "a")
    await order(one, LoadModel, 2, "b")
    await order(one, UnloadModel, 3, "a")
    assert one.supervisor.pid == first, "with a loaded model its memory cannot be distinguished from missing memory"
    one.supervisor.send(encode(UnloadModel(4, "b")), UnloadModel, 4)
    await one.until(lambda: recycled(one))
    assert one.supervisor.pid != first
    assert gone(first or 0)
    assert (one.supervisor.state.restarts, one.supervisor.state.recycles) == (0, 1)
    assert "200.0 MiB" in one.supervisor.state.cause
    assert diary(tmp_path) == [("", ""), ("", "")], "nothing is loaded again, and nothing is kept out"
    assert not {"failed", "hung"} & set(one.states)


@pytest.mark.slow
@pytest.mark.parametrize("keeps", ["a request", "a preloaded model"])
async def test_an_engine_that_is_used_is_not_replaced(keeps: str, agent: Callable[..., Agent], tmp_path: Path):
    preload = {"models.preload": ("p",)} if keeps == "a preloaded model" else {}
    answers = "    elif isinstance(frame, Cancel):\n        report()\n"
    one = agent(NEVER, engine(tmp_path, answers + LEAKS), **preload)
    await one.supervisor.start()
    await one.ready()
    first = one.supervisor.pid
    await order(one, LoadModel, 1, "a")
    if keeps == "a request":
        one.generate(7)
    await order(one, UnloadModel, 2, "a")
    await one.until(lambda: one.supervisor.reports.latest and one.supervisor.reports.latest.unreturned)
    assert one.supervisor.pid == first
    assert not one.supervisor.state.recycles
    one.supervisor.send(encode(Cancel(7)), Cancel, 7)
    if keeps == "a request":
        await one.until(lambda: recycled(one))
        return
    await order(one, LoadModel, 3, "a")
    assert one.supervisor.pid == first


@pytest.mark.slow
async def test_the_memory_of_a_real_engine_that_leaks_is_returned(agent: Callable[..., Agent]):
    leaky = """
        from node.engine.models import model_unloader as loading
        unload, leaked = loading.ModelUnloader.unload, []

        def leaking(unloader, name):
            unload(unloader, name)
            leaked.append(bytearray(b"x") * (150 * 2**20))

        loading.ModelUnloader.unload = leaking
        child.main()
    """
    name = "macpool-tiny"
    command = [sys.executable, "-c", "from node.engine.process import main as child\n" + textwrap.dedent(leaky)]
    settings = {
        "engine.kind": "mlx",
        "models.use_huggingface_cache": False,
        "models.trial": False,
        "models.profile": "off",
    }
    one = agent(NEVER, command, **settings, **{"models.folders": (str(models.EMBEDDED.parent),)})
    await one.supervisor.start()
    await one.ready()
    first = one.supervisor.pid
    await order(one, LoadModel, 1, name)
    await order(one, UnloadModel, 2, name)
    await one.until(lambda: recycled(one))
    assert one.supervisor.pid != first
    assert one.supervisor.state.restarts == 0
    await order(one, LoadModel, 3, name)
    reading = one.supervisor.probe.read_footprint().phys
    assert reading is not None
    assert one.supervisor.reports.latest is not None
    assert reading < one.supervisor.reports.latest.memory.base + 100 * MIB


@pytest.mark.slow
async def test_a_resting_engine_holds_no_model_and_preloads_models_afterwards(agent: Callable[..., Agent]):
    name = "macpool-tiny"
    settings = {
        "engine.kind": "mlx",
        "models.use_huggingface_cache": False,
        "models.trial": False,
        "models.profile": "off",
        "models.preload": (name,),
    }
    one = agent(**settings, **{"models.folders": (str(models.EMBEDDED.parent),)})

    def loaded() -> bool:
        report = one.supervisor.reports.latest
        return report is not None and any(model.loaded for model in report.models)

    await one.supervisor.start()
    await one.ready()
    await one.until(loaded)
    first = one.supervisor.pid
    one.supervisor.release_memory()
    one.supervisor.release_memory()
    await one.until(lambda: recycled(one) and one.supervisor.reports.latest is not None)
    assert one.supervisor.pid != first
    assert gone(first or 0)
    assert not loaded()
    assert (one.supervisor.state.restarts, one.supervisor.state.recycles) == (0, 1)
    assert one.supervisor.reports.latest is not None
    assert {model.name for model in one.supervisor.reports.latest.models} == {name}, (
        "the servable models are still reported"
    )
    os.kill(one.supervisor.pid or 0, signal.SIGKILL)
    await one.until(lambda: one.supervisor.state.restarts == 1 and one.supervisor.ready is not None)
    assert not loaded(), "a death brings nothing back"
    one.supervisor.wake()
    await one.until(loaded)


PRELOADED = """
    models = tuple(Model(name) for name in settings.models.preload)
    line.sendall(encode(EngineReport(Memory(cap=1, armed=True), models, 0, 0)))
    while line.recv(1 << 16):
        pass
"""
"""A program that reports the models of `models.preload` as loaded."""


@pytest.mark.slow
@pytest.mark.parametrize("rests", [True, False])
async def test_a_rest_that_begins_or_ends_while_an_engine_starts_counts_for_that_engine(
    rests: bool, agent: Callable[..., Agent]
):
    one = agent(None, program(PRELOADED), **{"models.preload": ("tiny",)})
    change = one.supervisor.release_memory if rests else one.supervisor.wake
    if not rests:
        one.supervisor.release_memory()
    await one.supervisor.start()
    await one.until(lambda: one.states == ["starting"])
    assert one.supervisor.child is None, "the process is being started"
    change()
    await one.until(lambda: one.supervisor.reports.latest is not None)
    assert one.supervisor.reports.latest is not None
    assert [model.name for model in one.supervisor.reports.latest.models] == ([] if rests else ["tiny"])


AT_ONCE = SupervisorTimeouts(first=0.01, longest=0.01)
IN_FORWARD = """
    elif isinstance(frame, Generate):
        # Dies in the forward of whoever says so; the others are only on the engine.
        if frame.messages[0].content in ("PREFILL", "JOIN", "LOAD", "DECODE"):
            recorder.begin(NativeCallKind[frame.messages[0].content], frame.model, frame.request)
            os.abort()
"""


@pytest.mark.slow
async def test_loaded_models_are_loaded_again_after_a_crash(agent: Callable[..., Agent], tmp_path: Path):
    one = agent(AT_ONCE, engine(tmp_path, ""))
    await one.supervisor.start()
    await one.ready()
    await order(one, LoadModel, 1, "first")
    await order(one, LoadModel, 2, "second")
    await die(one)
    assert diary(tmp_path) == [("", ""), ("first,second", "")]
    await die(one)
    assert diary(tmp_path)[2] == ("first,second", ""), "what was restored is as good as what was asked for"


@pytest.mark.slow
async def test_what_was_unloaded_is_not_loaded_again(agent: Callable[..., Agent], tmp_path: Path):
    one = agent(AT_ONCE, engine(tmp_path, ""))
    await one.supervisor.start()
    await one.ready()
    await order(one, LoadModel, 1, "kept")
    await order(one, LoadModel, 2, "given back")
    await order(one, UnloadModel, 3, "given back")
    await die(one)
    assert diary(tmp_path)[1] == ("kept", "")


@pytest.mark.slow
async def test_a_load_that_a_crash_interrupted_is_repeated_if_the_model_was_loaded_before(
    agent: Callable[..., Agent], tmp_path: Path
):
    command = engine(
        tmp_path,
        """
        elif isinstance(frame, Generate):
            models["never loaded"] = Model("never loaded", loading=True)
            report()
        """,
    )
    one = agent(AT_ONCE, command)
    await one.supervisor.start()
    await one.ready()
    await order(one, LoadModel, 1, "slow")
    await die(one)
    one.generate(2)
    await one.until(lambda: one.supervisor.reports.latest and len(one.supervisor.reports.latest.models) == 2)
    await die(one)
    assert diary(tmp_path) == [("", ""), ("slow", ""), ("slow", "")]


@pytest.mark.slow
async def test_a_model_in_the_forward_of_two_crashes_is_quarantined(agent: Callable[..., Agent], tmp_path: Path):
    one = agent(AT_ONCE, engine(tmp_path, IN_FORWARD))
    await one.supervisor.start()
    await one.ready()
    await order(one, LoadModel, 1, "scripted-1")
    await order(one, LoadModel, 2, "innocent")
    for number, doing in ((3, "PREFILL"), (4, "DECODE")):
        pid = one.supervisor.pid
        one.generate(number, doing)
        await one.end(number)
        await one.until(lambda pid=pid: one.supervisor.pid not in (pid, None) and one.armed())
    assert diary(tmp_path) == [("", ""), ("innocent,scripted-1", ""), ("innocent", "scripted-1")]
    assert "crash 2 within 10 minutes: loading the model is blocked for 10 minutes" in one.supervisor.state.cause


@pytest.mark.slow
@pytest.mark.parametrize(
    ("doing", "code"),
    [
        ("PREFILL", FailureCode.ENGINE_CRASHED),
        ("JOIN", FailureCode.ENGINE_CRASHED),
        ("LOAD", FailureCode.ENGINE_CRASHED),
        ("DECODE", FailureCode.ENGINE_LOST),
    ],
)
async def test_only_the_request_in_the_forward_is_blamed(
    agent: Callable[..., Agent], tmp_path: Path, doing: str, code: str
):
    one = agent(AT_ONCE, engine(tmp_path, IN_FORWARD))
    await one.supervisor.start()
    await one.ready()
    one.generate(1)
    one.generate(2, doing)
    ends = [await one.end(number) for number in (1, 2)]
    assert [end.code for end in ends if isinstance(end, Failed)] == [FailureCode.ENGINE_LOST, code]
    assert all(f"it was in the {doing.lower()} of scripted-1" in end.message for end in ends if isinstance(end, Failed))


@pytest.mark.slow
async def test_an_engine_that_crashes_outside_of_any_call_names_no_request(agent: Callable[..., Agent], tmp_path: Path):
    one = agent(AT_ONCE, engine(tmp_path, "elif isinstance(frame, Generate):\n    sys.exit(3)"))
    await one.supervisor.start()
    await one.ready()
    one.generate(1)
    end = await one.end(1)
    assert isinstance(end, Failed)
    assert (end.code, end.message) == (FailureCode.ENGINE_LOST, "the engine process ended with exit code 3")


@pytest.mark.slow
async def test_a_step_that_never_ends_while_pings_are_answered_is_hung(agent: Callable[..., Agent]):
    command = program("""
        line.sendall(encode(EngineReport(Memory(cap=1, armed=True), (), 0, 0)))
        splitter = Splitter()
        while data := line.recv(65536):
            for tag, body in splitter.feed(data):
                frame = decode(tag, body)
                if isinstance(frame, Ping):  # one at the start, one at the request, one after `ping_busy`
                    line.sendall(encode(Pong(frame.nonce, 99.0 if frame.nonce > 2 else 0.0, 0.02)))
    """)
    one = agent(SupervisorTimeouts(first=5.0, ping_busy=0.05, ping_idle=600.0), command)
    await one.supervisor.start()
    await one.until(lambda: one.supervisor.ready)
    one.generate(1)
    await one.until(lambda: one.supervisor.state.cause and one.supervisor.state.state == "restarting")
    assert one.supervisor.pid is None
    assert "one call has taken 99 s" in one.supervisor.state.cause
    assert one.states == ["starting", "ready", "hung", "restarting"]


@pytest.mark.slow
async def test_a_call_may_last_five_times_what_was_expected_from_its_own_beginning_on(agent: Callable[..., Agent]):
    command = program("""
        line.sendall(encode(EngineReport(Memory(cap=1, armed=True), (), 0, 0)))
        splitter = Splitter()
        while data := line.recv(65536):
            for tag, body in splitter.feed(data):
                frame = decode(tag, body)
                if isinstance(frame, Ping):
                    line.sendall(encode(Pong(frame.nonce, 300.0, 100.0)))
    """)
    one = agent(SupervisorTimeouts(ping_busy=60.0, ping_idle=60.0), command)
    assert one.supervisor.probe.call_until == 0.0
    await one.supervisor.start()
    while not one.supervisor.probe.call_until:  # noqa: ASYNC110  a sign of life is heard nowhere else
        await asyncio.sleep(0.01)
    assert one.supervisor.probe.call_until - time.monotonic() == pytest.approx(5 * 100.0 - 300.0, abs=10.0)


@pytest.mark.slow
async def test_a_child_that_never_starts_is_failed_with_its_last_output(agent: Callable[..., Agent]):
    command = program("sys.exit('no such luck')")
    one = agent(SupervisorTimeouts(first=0.01, longest=0.04), command)
    await one.supervisor.start()
    await one.until(lambda: one.supervisor.state.state == "failed")
    assert one.supervisor.state.cause == "the engine process ended with exit code 1: no such luck"
    assert one.supervisor.state.restarts >= 3
    assert "ready" not in one.states


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("os.kill(os.getpid(), 9)", "the engine process ended by SIGKILL"),
        ("os.kill(os.getpid(), 40)", "the engine process ended by signal 40"),
        ("sys.exit(3)", "the engine process ended with exit code 3"),
        ("sys.exit(0)", "the engine process ended with exit code 0"),
    ],
)
async def test_a_crash_is_described_by_its_signal_or_exit_code(agent: Callable[..., Agent], line: str, cause: str):
    one = agent(SupervisorTimeouts(first=0.01, longest=0.01), program(line))
    await one.supervisor.start()
    await one.until(lambda: one.supervisor.state.state == "failed")
    assert one.supervisor.state.cause == cause


@pytest.mark.slow
async def test_a_child_that_was_healthy_for_long_enough_is_restarted_without_a_longer_wait(
    agent: Callable[..., Agent],
):
    one = agent(SupervisorTimeouts(first=0.01, longest=0.02, healthy=0.0), program("sys.exit('after a long life')"))
    await one.supervisor.start()
    await one.until(lambda: one.supervisor.state.restarts >= 4)
    assert set(one.states) == {"starting", "restarting"}, "each death is the first in a row"


@pytest.mark.slow
async def test_the_state_follows_the_last_report_of_the_engine(agent: Callable[..., Agent]):
    one = agent(step_ms=20, max_batch_size=1)
    await one.supervisor.start()
    await one.ready()
    for number in range(1, 4):
        one.generate(number, tokens=10_000)
    await one.until(lambda: one.supervisor.state.waiting == 2 and one.supervisor.state.running == 1)
    state, report = one.supervisor.state, one.supervisor.reports.latest
    assert report is not None
    assert (state.running, state.waiting, state.queued_tokens) == (report.running, report.waiting, report.queued_tokens)
    assert state.queued_tokens > 0
    assert (state.counts, state.rows) == (report.counts, 1)
    assert state.counts.checks > 0
    told = msgspec.structs.replace(report, cache=CacheState(entries=3, disk_files=5), wired=7 * GIB)
    one.supervisor.reports.store(told, time.monotonic())
    state = one.supervisor.state
    assert (state.cache.entries, state.cache.disk_files, state.wired) == (3, 5, 7 * GIB)


@pytest.mark.slow
async def test_an_order_to_free_memory_is_identified_by_the_number_in_reports(agent: Callable[..., Agent]):
    one = agent()
    await one.supervisor.start()
    await one.ready()
    assert one.supervisor.reports.freed_order == 0
    assert [one.supervisor.orders.free_memory(GIB), one.supervisor.orders.free_memory(GIB)] == [1, 2]
    await one.until(lambda: one.supervisor.reports.freed_order == 2)


@pytest.mark.slow
async def test_an_engine_that_does_not_read_gets_no_new_requests(agent: Callable[..., Agent]):
    one = agent()
    await one.supervisor.start()
    await one.ready()
    engine = psutil.Process(one.supervisor.pid)
    engine.suspend()
    assert MAX_UNSENT_BYTES >= 2 * MAX_JOINED_BYTES, "two requests of the largest size may wait"
    for number in range(1, MAX_UNSENT_BYTES // MIB + 4):
        one.generate(number, "x" * MIB)
    end = await one.end(MAX_UNSENT_BYTES // MIB + 3)
    assert isinstance(end, Refusal)
    assert end.refused.code is RefusalCode.NOT_READY
    assert not one.ends(1), "what was sent before waits for it"
    engine.kill()


@pytest.mark.slow
async def test_a_program_that_cannot_be_started_is_a_cause_too(agent: Callable[..., Agent]):
    one = agent(SupervisorTimeouts(first=0.01, longest=0.02), ["/nowhere/python"])
    await one.supervisor.start()
    await one.until(lambda: one.supervisor.state.state == "failed")
    assert "could not be started" in one.supervisor.state.cause


@pytest.mark.slow
async def test_a_child_that_breaks_the_rules_of_the_wire_is_ended(agent: Callable[..., Agent]):
    one = agent(SupervisorTimeouts(first=5.0), program("line.sendall(bytes([0, 0, 0, 2, 240, 0])); time.sleep(60)"))
    await one.supervisor.start()
    await one.until(lambda: one.supervisor.state.cause)
    assert "its frames cannot be read: unknown frame 240" in one.supervisor.state.cause


DEAF = """
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    line.sendall(encode(EngineReport(Memory(cap=1, armed=True), (), 0, 0)))
    time.sleep(60)
"""
"""A program that ignores the end of its socket and SIGTERM."""


async def test_a_child_that_closes_its_socket_and_does_not_end_is_ended_and_replaced(
    agent: Callable[..., Agent], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("node.engine_process.supervisor.EXIT_AFTER_CLOSE_SECONDS", 0.05)
    text = 'import os, sys, time; os.close(int(sys.argv[sys.argv.index("--socket") + 1])); time.sleep(600)'
    one = agent(replace(QUICK, first=60.0, longest=120.0), [sys.executable, "-c", text])
    await one.supervisor.start()
    await one.until(lambda: one.supervisor.state.restarts)
    assert one.supervisor.state.cause == "it closed its socket without exiting"
    assert one.supervisor.pid is None


@pytest.mark.slow
async def test_a_child_that_ignores_the_end_of_its_socket_and_sigterm_is_killed(agent: Callable[..., Agent]):
    one = agent(SupervisorTimeouts(leave=0.2, stopping=0.4), program(DEAF))
    await one.supervisor.start()
    await one.until(lambda: one.states == ["starting", "ready"])
    pid = one.supervisor.pid
    assert pid is not None
    begun = time.monotonic()
    await one.supervisor.stop()
    assert time.monotonic() - begun < 5.0
    assert not psutil.pid_exists(pid)


def calls(folder: Path, busy: float, expected: float, lasts: float) -> list[str]:
    """Return the command of a program that acts as an engine during a native call.

    Every Pong reports that the call began `busy` seconds ago and is expected to last `expected` seconds. The program
    exits `lasts` seconds after the agent has sent its last byte. The file `ends` in `folder` records each StopEngine,
    and SIGTERM or this exit.
    """
    return program(f"""
        import signal, threading
        def note(text):
            with open({str(folder / "ends")!r}, "a") as file:
                print(text, file=file)
        def terminated(*_):
            note("SIGTERM")
            os._exit(0)
        signal.signal(signal.SIGTERM, terminated)
        line.sendall(encode(EngineReport(Memory(cap=1, armed=True), (), 0, 0)))
        splitter = Splitter()
        while data := line.recv(65536):
            for tag, body in splitter.feed(data):
                frame = decode(tag, body)
                if isinstance(frame, Ping):
                    line.sendall(encode(Pong(frame.nonce, {busy}, {expected})))
                    line.sendall(encode(EngineReport(Memory(cap=1, armed=True), (), 1, 0)))
                if isinstance(frame, StopEngine):
                    note(f"Stop within {{frame.seconds:.0f}}")
        threading.Event().wait({lasts})
        note("left")
        os._exit(0)
    """)


def ends(folder: Path) -> list[str]:
    return (folder / "ends").read_text().splitlines()


async def in_a_call(one: Agent) -> None:
    await one.supervisor.start()
    await one.until(lambda: one.supervisor.reports.latest is not None and one.supervisor.reports.latest.running)
    assert one.supervisor.probe.call_until


SOON = SupervisorTimeouts(first=600.0, longest=600.0, ping_busy=0.05, ping_idle=0.05, turn=0.2, leave=0.3, over=0.2)


@pytest.mark.slow
async def test_the_call_in_flight_may_take_its_time_before_sigterm(agent: Callable[..., Agent], tmp_path: Path):
    one = agent(SOON, calls(tmp_path, busy=0.1, expected=0.5, lasts=1.5))
    await in_a_call(one)
    await one.supervisor.stop()
    assert ends(tmp_path) == ["Stop within 3", "left"], "5 × 0.5 s were its, and twice 0.3 s to leave"


@pytest.mark.slow
async def test_a_child_that_outlasts_its_call_is_terminated(agent: Callable[..., Agent], tmp_path: Path):
    one = agent(SOON, calls(tmp_path, busy=0.1, expected=0.1, lasts=60))
    await in_a_call(one)
    await one.supervisor.stop()
    assert ends(tmp_path) == ["Stop within 1", "SIGTERM"]


@pytest.mark.slow
async def test_the_agents_own_end_waits_no_longer_than_it_may(agent: Callable[..., Agent], tmp_path: Path):
    one = agent(replace(SOON, stopping=1.0), calls(tmp_path, busy=1.0, expected=500.0, lasts=60))
    await in_a_call(one)
    begun = time.monotonic()
    await one.supervisor.stop()
    assert time.monotonic() - begun < 5.0
    assert ends(tmp_path) == ["Stop within 1", "SIGTERM"]


@pytest.mark.slow
async def test_over_its_cap_a_child_has_a_short_time_and_not_none(agent: Callable[..., Agent], tmp_path: Path):
    one = agent(replace(SOON, over=0.5), calls(tmp_path, busy=1.0, expected=500.0, lasts=60))
    await in_a_call(one)
    begun = time.monotonic()
    one.supervisor.end("over its cap")
    assert one.supervisor.ready is None, "it gets nothing new"
    one.generate(1)
    refused = await one.end(1)
    assert isinstance(refused, Refusal)
    await one.until(lambda: one.supervisor.pid is None)
    assert 0.4 < time.monotonic() - begun < 5.0
    assert ends(tmp_path) == ["Stop within 1", "SIGTERM"]
    assert one.supervisor.state.cause == "over its cap"


@pytest.mark.slow
async def test_an_end_under_way_may_become_sooner_and_not_later(agent: Callable[..., Agent], tmp_path: Path):
    preload = {"models.preload": ["scripted-1"]}
    one = agent(replace(SOON, leave=3.0), calls(tmp_path, busy=1.0, expected=500.0, lasts=60), **preload)
    await in_a_call(one)
    child = one.supervisor.child
    assert child is not None
    one.supervisor.release_memory()
    one.supervisor.end("over its cap")
    due = child.killed_at
    assert due < time.monotonic() + 1.0
    one.supervisor.wake()
    assert child.killed_at == due
    assert one.supervisor.state.recycles == 1
    await one.until(lambda: one.supervisor.pid != child.process.pid)
    assert ends(tmp_path)[-1] == "SIGTERM"


@pytest.mark.slow
async def test_a_child_that_ends_is_not_ready_again_for_any_report(agent: Callable[..., Agent], tmp_path: Path):
    command = engine(tmp_path, "")
    command[-1] = command[-1].replace("sys.exit(0)", "[(report(), time.sleep(0.1)) for _ in range(3)]; os._exit(0)")
    one = agent(NEVER, command)
    await one.supervisor.start()
    await one.ready()
    before, pid = len(one.states), one.supervisor.pid
    one.supervisor.end("over its cap")
    await one.until(lambda: one.supervisor.pid is None)
    assert "ready" not in one.states[before:]
    assert gone(pid or 0)


@pytest.mark.slow
async def test_a_real_engine_that_writes_a_prompt_is_stopped_in_order(agent: Callable[..., Agent]):
    """The running forward returns, the model is released, and no signal was needed."""
    slow = """
        import os, time
        from node.engine.scheduling import prefill_runner as generation
        forward = generation.run_forward

        def slow(*args, **more):
            os.write(2, b"the forward begins\\n")
            time.sleep(1.0)
            found = forward(*args, **more)
            os.write(2, b"the forward returned\\n")
            return found

        generation.run_forward = slow
        child.main()
    """
    command = [sys.executable, "-c", "from node.engine.process import main as child\n" + textwrap.dedent(slow)]
    settings = {
        "engine.kind": "mlx",
        "engine.mlx.prefill_step_size": 256,
        "engine.mlx.min_prefill_step": 64,
        "models.use_huggingface_cache": False,
        "models.trial": False,
        "models.profile": "off",
    }
    one = agent(NEVER, command, **settings, **{"models.folders": (str(models.EMBEDDED.parent),)})
    await one.supervisor.start()
    await one.ready()
    await order(one, LoadModel, 1, "macpool-tiny")
    frame = Generate(2, 2, "r", "macpool-tiny", (Message("user", "word " * 300),), GenerationParams(max_tokens=4), 0)
    one.supervisor.send(encode(frame), Generate, 2)
    await asyncio.to_thread(until, lambda: "the forward begins" in one.log_file.read_text(), what="a forward")
    child = one.supervisor.child
    assert child is not None
    await one.supervisor.stop()
    said = one.log_file.read_text()
    assert child.process.returncode == 0
    assert said.count("the forward begins") == said.count("the forward returned") == 1
    assert said.index("the forward returned") < said.index("model unloaded")


# wired memory that is not released

LEAKY = SupervisorTimeouts(first=0.01, longest=0.01, settle=0.0, ping_idle=0.05)


async def loses(one: Agent, before: int, after: int) -> None:
    """Kill an engine that has wired 20 GiB of weights, and await the next one. The Mac had `before` bytes wired without
    the weights, and has `after` bytes wired after the end."""
    supervisor, pid = one.supervisor, one.supervisor.pid
    await one.until(one.armed)
    one.wired = before + 20 * GIB
    deaths = supervisor.state.restarts
    assert pid is not None
    child = supervisor.child
    assert child is not None
    async with asyncio.timeout(WAIT):
        while child.wired.last != one.wired:  # noqa: ASYNC110  the watch of the child has no event
            await asyncio.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    one.wired = after
    await one.until(lambda: supervisor.state.restarts > deaths and supervisor.pid != pid)


@pytest.mark.slow
async def test_wired_memory_that_stays_is_logged_and_after_two_times_no_engine_starts(
    agent: Callable[..., Agent],
):
    one = agent(LEAKY, weights="20GiB")
    one.wired = 3 * GIB
    await one.supervisor.start()
    await one.ready()
    assert one.supervisor.warnings == ()
    await loses(one, 3 * GIB, 22 * GIB)
    await one.until(lambda: one.armed() or one.supervisor.state.leaked)
    await one.until(one.armed)
    (warning,) = one.supervisor.warnings
    assert warning == (
        "19.0 GiB of ended engines stayed wired (this Mac had 3.0 GiB wired before the last one started "
        "and has 22.0 GiB now): restart this Mac to free the memory"
    )
    assert one.supervisor.state.leaked == 19 * GIB
    await loses(one, 22 * GIB, 42 * GIB)
    await one.until(lambda: one.supervisor.state.state == "failed")
    assert one.supervisor.pid is None
    assert one.supervisor.state.leaked == 39 * GIB
    assert one.supervisor.state.cause.startswith("the engine is not restarted: 39.0 GiB of ended engines stayed wired")
    one.generate(9)
    end = await one.end(9)
    assert isinstance(end, Refusal)
    assert "restart this Mac" in end.refused.message
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(one.until(lambda: one.supervisor.state.state != "failed"), 0.5)
    one.wired = 4 * GIB
    await one.until(one.armed)
    assert one.supervisor.warnings == (), "what comes back was another program's"
    assert one.supervisor.state.leaked == 0


@pytest.mark.slow
async def test_a_leak_is_reported_long_before_the_next_engine_starts(agent: Callable[..., Agent]):
    one = agent(SupervisorTimeouts(first=60.0, longest=60.0, settle=0.5, ping_idle=0.05), weights="20GiB")
    one.wired = 3 * GIB
    await one.supervisor.start()
    await one.ready()
    child, one.wired = one.supervisor.child, 23 * GIB
    assert child is not None
    async with asyncio.timeout(WAIT):
        while child.wired.last != one.wired:  # noqa: ASYNC110  the watch of the child has no event
            await asyncio.sleep(0.01)
    child.process.kill()
    async with asyncio.timeout(20):
        await one.until(lambda: one.supervisor.state.leaked)


@pytest.mark.slow
async def test_weights_that_a_load_has_read_so_far_can_stay_wired_too(agent: Callable[..., Agent]):
    half = """
        model = Model("m", loading=True, weights=20 * 2**30, progress=0.5)
        line.sendall(encode(EngineReport(Memory(cap=1, armed=True), (model,), 0, 0)))
        line.recv(1)
        time.sleep(60)
    """
    one = agent(LEAKY, program(half))
    one.wired = GIB
    await one.supervisor.start()
    await one.until(lambda: one.supervisor.reports.latest)
    one.wired = 9 * GIB
    assert one.supervisor.pid is not None
    os.kill(one.supervisor.pid, signal.SIGKILL)
    await one.until(lambda: one.supervisor.state.restarts)
    await one.until(lambda: one.supervisor.state.leaked)
    assert one.supervisor.state.leaked == 8 * GIB, "of the 10 GiB that were read"


@pytest.mark.slow
async def test_wired_memory_that_is_released_in_time_is_no_leak(agent: Callable[..., Agent]):
    one = agent(replace(LEAKY, settle=WAIT, look=0.02), weights="20GiB")
    one.wired = 3 * GIB
    await one.supervisor.start()
    await one.ready()
    first = one.supervisor.pid
    await loses(one, 3 * GIB, 23 * GIB)
    assert one.supervisor.pid is None, "the next is not started into memory that is not there yet"
    assert one.supervisor.warnings == ()
    one.wired = 4 * GIB
    await one.until(one.armed)
    assert one.supervisor.pid not in (None, first)
    assert one.supervisor.warnings == ()


@pytest.mark.slow
@pytest.mark.parametrize("reading", ["none", "before only", "after only"])
async def test_where_wired_memory_cannot_be_read_nothing_is_judged(agent: Callable[..., Agent], reading: str):
    one = agent(LEAKY, weights="20GiB")
    one.wired = 3 * GIB if reading == "before only" else None
    await one.supervisor.start()
    await one.ready()
    for _ in range(3):
        pid = one.supervisor.pid
        assert pid is not None
        one.wired = 90 * GIB if reading == "after only" else None
        os.kill(pid, signal.SIGKILL)
        await one.until(lambda pid=pid: one.supervisor.pid != pid)
        one.wired = 3 * GIB if reading == "before only" else None
        await one.until(one.armed)
    assert one.supervisor.warnings == ()


@pytest.mark.slow
async def test_an_engine_that_was_recycled_can_leak_too(agent: Callable[..., Agent]):
    one = agent(LEAKY, weights="20GiB", **{"models.preload": ["scripted-1"]})
    one.wired = 3 * GIB
    await one.supervisor.start()
    await one.ready()
    for round_, recycle in ((1, one.supervisor.release_memory), (2, one.supervisor.wake)):
        one.wired = (3 + 20 * round_) * GIB
        recycle()
        await one.until(lambda round_=round_: one.supervisor.state.leaked == 20 * round_ * GIB)
        await one.until(lambda round_=round_: one.armed() or round_ == 2)
    await one.until(lambda: one.supervisor.state.state == "failed")
    assert one.supervisor.state.restarts == 0


@pytest.mark.slow
def test_nothing_outlives_an_agent_that_is_killed(tmp_path: Path):
    parent = """
        import asyncio, pathlib, sys
        from node.settings import EngineSettings, NodeSettings
        from node.engine_process.supervisor import Supervisor
        from node.illegal_events import IllegalEvents
        from wire.frames import MemoryLimits

        async def main():
            up = asyncio.Event()
            one = Supervisor(
                NodeSettings(engine=EngineSettings(kind="scripted")), on_frame=lambda *frame: None, on_change=up.set,
                log_file=pathlib.Path(sys.argv[1]), scratch=pathlib.Path(sys.argv[1]).parent / "scratch",
                wired=lambda: None,
                illegal_events=IllegalEvents(),
            )
            one.orders.set_limits(MemoryLimits(2**36, 2**36, 2**30, "metal"))
            await one.start()
            while one.state.state != "ready":
                up.clear()
                await up.wait()
            print(one.pid, flush=True)
            await asyncio.Event().wait()

        asyncio.run(main())
    """
    command = [sys.executable, "-c", textwrap.dedent(parent), str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as agent:
        try:
            assert agent.stdout is not None
            pid = int(agent.stdout.readline())
            assert not gone(pid)
        finally:
            agent.kill()
        agent.wait(WAIT)
        begun = time.monotonic()
        while not gone(pid):
            assert time.monotonic() - begun < 5.0
            time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    "module", ["node.settings", "node.engine_process.supervisor", "node.memory.sensor", "node.engine.scripted.engine"]
)
def test_no_model_library_is_imported_by_what_the_agent_imports(module: str):
    script = f"import sys, {module}; print([name for name in sys.modules if name.split('.')[0] in ('mlx', 'mlx_lm')])"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
