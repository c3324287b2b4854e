"""The video side of a node for tests: the worker's real environment, installed once, and a very small package.

`Node` is the composition root of a node without its link, with real engine processes and real workers.
"""

import asyncio
import fcntl
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from node.engine_process.supervisor import Supervisor
from node.engine_process.timeouts import SupervisorTimeouts
from node.illegal_events import IllegalEvents
from node.memory.limits import Limiter
from node.memory.poll import MemoryPoll
from node.memory.sensor import open_machine
from node.settings import NodeSettings, resolve_settings
from node.video import environment
from node.video.lease_rules import LeasePhase
from node.video.wiring import VideoSubsystem
from tests.support.processes import ROOT
from tests.support.processes import environment as clean
from wire.codec import decode, encode
from wire.frames import (
    Frame,
    Generate,
    GenerationParams,
    LeaseEnded,
    LeaseGranted,
    LeaseRefused,
    LeaseRelease,
    LeaseRequest,
    Message,
)
from wire.units import GIB

CACHE = ROOT / ".cache" / "video"
SCRIPT = ROOT / "tests" / "support" / "video" / "tiny_wan.py"
JOB = {"prompt": "a red fox", "width": 64, "height": 48, "frames": 9, "fps": 8, "steps": 4, "seed": 1}
LONG = {**JOB, "prompt": "hold=denoising", "steps": 400}
"""A job whose end no test waits for, with the engine and with its stand-in."""
WAIT = 60.0
LEASE = 2 * GIB
F = TypeVar("F", bound=Frame)


@functools.cache
def environments() -> Path:
    """Return the folder with the worker's environment. The first call installs the environment as a user does."""
    CACHE.mkdir(parents=True, exist_ok=True)
    beside = Path(sys.prefix).resolve().parent / ".uv" / "bin"
    path = os.pathsep.join(filter(None, [os.environ.get("PATH"), str(beside)]))
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if environment.describe_missing(CACHE):
            command = [sys.executable, "-m", "node.video.environment", "--folder", str(CACHE)]
            done = subprocess.run(command, capture_output=True, text=True, env=clean(PATH=path), cwd=ROOT)
            assert done.returncode == 0, done.stderr
    return CACHE


def python() -> Path:
    """Return the interpreter of the environment."""
    return environment.get_interpreter(
        environment.get_environment_path(environments(), environment.find_requirement_files())
    )


@functools.cache
def tiny_wan() -> Path:
    """Return a folder with the package `tiny-wan`, which is written once."""
    interpreter = python()
    digest = hashlib.sha256(SCRIPT.read_bytes()).hexdigest()[:12]
    folder = CACHE / f"packages-{digest}"
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "tiny-wan" / "text_encoder" / "model.safetensors").exists():
            for old in CACHE.glob("packages-*"):
                shutil.rmtree(old)
            _write(interpreter, folder / "tiny-wan")
    return folder


def spoiled(folder: Path, how: str) -> Path:
    """Return a folder whose package is broken in the given way."""
    shutil.copytree(tiny_wan() / "tiny-wan", folder / "tiny-wan")
    _write(python(), folder / "tiny-wan", how)
    return folder


def _write(interpreter: Path, *words: str | Path) -> None:
    subprocess.run([interpreter, "-I", SCRIPT, *words], check=True, env=clean(), stdin=subprocess.DEVNULL)


def flat(**settings: object) -> dict[str, object]:
    """Return the settings of a node with a pretended Mac of 128 GiB, a tiny package and short timeouts."""
    return {
        "engine.kind": "scripted",
        "memory.cap": "90GiB",
        "memory.margin": "1GiB",
        "models.use_huggingface_cache": False,
        "models.folders": str(tiny_wan()),
        "worker.environments": str(environments()),
        "worker.start_timeout_seconds": 20,
        **{key.replace("__", "."): value for key, value in settings.items()},
    }


def words(**settings: object) -> tuple[str, ...]:
    """Return the same settings as arguments of `--set`."""
    made = flat(**settings).items()
    return tuple(f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in made)


class Node:
    """The composition root of a node, without a link. With `attends`, a granted lease gets its worker parent at
    once."""

    def __init__(
        self, folder: Path, settings: Mapping[str, object], *, attends: bool = True, model: str = "tiny-wan"
    ) -> None:
        folder.mkdir(exist_ok=True)
        resolved = resolve_settings([("test", settings)])
        self.settings: NodeSettings = resolved.value
        self.folder = folder
        self.machine = open_machine(self.settings)
        self.limiter = Limiter(self.settings, self.machine, resolved.origins)
        self.frames: list[Frame] = []
        self.engine_frames: list[tuple[Frame, int]] = []
        self.attendants: list[subprocess.Popen[bytes]] = []
        self._attends = attends
        self._model = model
        self._changed = asyncio.Event()
        self.illegal_events = IllegalEvents()
        self.supervisor = Supervisor(
            self.settings,
            on_frame=self._frame,
            on_change=self._change,
            log_file=folder / "engine.log",
            scratch=folder / "scratch",
            wired=self.limiter.read_wired,
            illegal_events=self.illegal_events,
            timeouts=SupervisorTimeouts(first=0.01, longest=0.01),
        )
        self.poll = MemoryPoll(self.limiter, self.machine, self.supervisor)
        self.studio = VideoSubsystem(
            self.settings,
            folder,
            self.limiter,
            self.poll,
            self.supervisor,
            send=self._said,
            changed=self._video_changed,
            illegal_events=self.illegal_events,
        )
        self.lender = self.studio.lease_manager

    def _frame(self, tag: int, encoded: bytes, request: int) -> None:
        self.engine_frames.append((decode(tag, encoded[5:]), request))
        self._changed.set()

    def _change(self) -> None:
        self.poll.poll_sooner()
        self.lender.on_engine_change()
        self._changed.set()

    def _video_changed(self) -> None:
        self._changed.set()

    def _said(self, frame: Frame) -> None:
        self.frames.append(frame)
        if isinstance(frame, LeaseGranted) and self._attends:
            self.attend(frame)
        self._changed.set()

    def attend(self, granted: LeaseGranted) -> None:
        """Start the worker parent of a lease as the actor does, in a process of its own."""
        command = [
            sys.executable,
            "-m",
            "node.video.worker.worker_parent",
            granted.folder,
            granted.lease,
            str(granted.generation),
        ]
        with (self.folder / "attendant.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                env=clean(OPENAI_API_KEY="sk-not-for-workers"),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.attendants.append(process)

    async def until(self, wanted: Callable[[], Any], seconds: float = WAIT) -> Any:
        """Wait until `wanted` is true. It is called after every frame or change, and every 0.1 s."""
        async with asyncio.timeout(seconds):
            while not (found := wanted()):
                self._changed.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), 0.1)
        return found

    async def start(self) -> "Node":
        """Start the engine, and wait until it has the newest memory limits."""
        self.poll.start()
        await self.supervisor.start()
        await self.studio.start()
        await self.studio.offer.checked.wait()
        await self.until(
            lambda: (
                self.supervisor.ready and self.supervisor.reports.limits_number >= self.supervisor.orders.limits_number
            )
        )
        return self

    async def stop(self) -> None:
        """End all processes."""
        await self.studio.stop()
        self.poll.stop()
        await self.supervisor.stop()
        for process in self.attendants:
            if process.poll() is None:
                process.kill()
            process.wait(30)

    # leases

    def ask(
        self,
        size: int = LEASE,
        job: Mapping[str, object] = JOB,
        lease: str = "l-1",
        generation: int = 1,
        model: str = "",
    ) -> None:
        """Request a lease; its job has the lease's name."""
        self.lender.handle_request(
            LeaseRequest(lease, generation, f"video_{lease}", model or self._model, size, msgspec.json.encode(job))
        )

    def release(self, cause: str, lease: str = "l-1", generation: int = 1) -> None:
        """End a lease."""
        self.lender.release(LeaseRelease(lease, generation, cause))

    async def frame(self, kind: type[F], lease: str = "l-1") -> F:
        """Wait for the frame of this kind about a lease."""
        return await self.until(
            lambda: next(
                (one for one in self.frames if isinstance(one, kind) and getattr(one, "lease", "") == lease), None
            )
        )

    async def answer(self, lease: str = "l-1") -> LeaseGranted | LeaseRefused:
        """Wait for the answer to the request for a lease."""
        return await self.until(
            lambda: next(
                (one for one in self.frames if isinstance(one, LeaseGranted | LeaseRefused) and one.lease == lease),
                None,
            )
        )

    async def ended(self, lease: str = "l-1") -> LeaseEnded:
        """Wait for the end of a lease."""
        return await self.frame(LeaseEnded, lease)

    async def working(self, phase: LeasePhase = LeasePhase.DENOISING, lease: str = "l-1") -> int:
        """Wait until a job has reached a phase; return the pid of its worker."""
        await self.until(lambda: any(one.lease == lease and one.phase == phase for one in self.lender.list_states()))
        assert self.limiter.worker is not None
        return self.limiter.worker

    @property
    def ceiling(self) -> int:
        """Return the current ceiling."""
        return self.limiter.compute_limits(self.supervisor.probe.read_footprint().phys).ceiling

    def chat(self, number: int, tokens: int = 20_000) -> None:
        """Start a chat of the scripted engine."""
        frame = Generate(
            number, number, "r", "scripted-1", (Message("user", "hi"),), GenerationParams(max_tokens=tokens), 0, tokens
        )
        self.supervisor.send(encode(frame), Generate, number)
