"""Pings during the tokenization of long texts, with the shipped engine process, driven over its socket."""

import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

from tokenizers import Tokenizer

from node.engine.process.main import encode_settings
from node.engine_process.environment import build_engine_environment
from node.settings import resolve_settings
from tests import models
from tests.bench.row import Row, commit, p99
from tests.support.processes import ROOT
from wire.codec import MAX_JOINED_BYTES, Splitter, decode, encode
from wire.frames import Failed, Finished, Frame, Generate, GenerationParams, MemoryLimits, Message, Ping, Pong, Refusal
from wire.units import GIB, MIB

BODIES = 4
EVERY, SHORT_EVERY = 0.01, 0.2
LINE = "word and more text, some Code(x) 12345\n"
CASES = ((7_900_000, False, "longer than the context"), (1_500_000, True, "tokenized completely"))
"""Bytes of a body, whether the context ends with its last token, and the case in words. No body is prefilled."""
LIMIT = 0.1
MOST_SECONDS = 240.0
SHORTS = 1000
"""Number of the first short prompt."""


class Engine:
    """An engine process; `answered` has the time of each pong by nonce, and of each end by request."""

    def __init__(self, folder: Path) -> None:
        flat: dict[str, object] = {
            "engine.kind": "mlx",
            "models.folders": (str(folder / "models"),),
            "models.use_huggingface_cache": False,
            "models.profile": "off",
        }
        settings = resolve_settings([("bench", flat)]).value
        self.line, theirs = socket.socketpair()
        environment = build_engine_environment(os.environ, folder / "scratch", settings.engine.mlx.blas)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "node.engine.process.main", "--socket", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        theirs.close()
        self.pongs: dict[int, float] = {}
        self.ends: dict[int, float] = {}
        self._changed = threading.Condition()
        self.line.sendall(encode_settings(settings))
        self.send(MemoryLimits(20 * GIB, 20 * GIB, 512 * MIB, "static"))
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, frame: Frame) -> None:
        """Send a frame."""
        self.line.sendall(encode(frame))

    def ask(self, number: int, text: str) -> None:
        """Send a request for one token."""
        params = GenerationParams(max_tokens=1)
        self.send(Generate(number, number, f"r{number}", "chat", (Message("user", text),), params, 0, 1))

    def until(self, wanted: "set[int]") -> None:
        """Wait until these requests have ended. Raise TimeoutError after `MOST_SECONDS`."""
        with self._changed:
            if not self._changed.wait_for(lambda: wanted <= self.ends.keys(), MOST_SECONDS):
                raise TimeoutError(f"{sorted(wanted - self.ends.keys())} have not ended")

    def _read(self) -> None:
        splitter = Splitter(longest=MAX_JOINED_BYTES)
        while data := _received(self.line):
            now = time.monotonic()
            with self._changed:
                for tag, body in splitter.feed(data):
                    frame = decode(tag, body)
                    if isinstance(frame, Pong):
                        self.pongs[frame.nonce] = now
                    elif isinstance(frame, Finished | Refusal | Failed):
                        self.ends[frame.request] = now
                self._changed.notify_all()

    def stop(self) -> None:
        """End the process by closing its socket."""
        self.line.close()
        try:
            self.process.wait(30.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _received(line: socket.socket) -> bytes:
    try:
        return line.recv(2**16)
    except OSError:  # closed by `stop`
        return b""


def measure(folder: Path, size: int) -> tuple[list[float], list[float], float]:
    """Return the seconds of each ping and of each short prompt while the bodies are tokenized, and of the bodies."""
    engine, text = Engine(folder), build_text(size)
    bodies, shorts = set(range(1, BODIES + 1)), dict[int, float]()
    try:
        engine.ask(SHORTS, "Hello!")
        engine.until({SHORTS})
        began = time.monotonic()
        for number in bodies:
            engine.ask(number, f"{number} {text}")
        sent: dict[int, float] = {}
        while not bodies <= engine.ends.keys() and time.monotonic() < began + MOST_SECONDS:
            now = time.monotonic()
            sent[len(sent) + 1] = now
            engine.send(Ping(len(sent)))
            if now >= max(shorts.values(), default=0.0) + SHORT_EVERY:
                shorts[SHORTS + len(shorts) + 1] = now
                engine.ask(SHORTS + len(shorts), "Hello!")
            time.sleep(EVERY)
        engine.until({*bodies, *shorts})
        seconds = max(engine.ends[number] for number in bodies) - began
        lost = time.monotonic()
        pings = [engine.pongs.get(nonce, lost) - at for nonce, at in sent.items()]
        return pings, [engine.ends[number] - at for number, at in shorts.items()], seconds
    finally:
        engine.stop()


def build_text(size: int) -> str:
    """Return a text of about `size` bytes."""
    return LINE * (size // len(LINE))


def lay_out(folder: Path, context: int) -> None:
    """Write the tiny model into the folder of the engine, with this context in tokens (0: its own)."""
    source, target = models.path("llama"), folder / "models" / "chat"
    target.mkdir(parents=True)
    for file in source.iterdir():
        (target / file.name).symlink_to(file)
    if context:
        config = json.loads((source / "config.json").read_text())
        (target / "config.json").unlink()
        (target / "config.json").write_text(json.dumps(config | {"max_position_embeddings": context}))


def count_tokens(text: str) -> int:
    """Return the tokens of a text, without those of the chat template."""
    tokenizer = Tokenizer.from_file(str(models.path("llama") / "tokenizer.json"))
    return len(tokenizer.encode(text, add_special_tokens=False).ids)


def bench_tokenize(folder: Path) -> list[Row]:
    """Measure pings and short prompts during four long bodies: refused by their count, and tokenized completely."""
    rows: list[Row] = []
    for size, complete, name in CASES:
        lay_out(folder / str(size), count_tokens(build_text(size)) if complete else 0)
        pings, shorts, seconds = measure(folder / str(size), size)
        figure = (
            f"{p99(pings) * 1000:.0f} ms (median {statistics.median(pings) * 1000:.1f}, longest "
            f"{max(pings) * 1000:.0f}, {len(pings)} pings in {seconds:.1f} s; "
            f"short prompts p99 {p99(shorts) * 1000:.0f} ms of {len(shorts)})"
        )
        row = f"ping p99 during {BODIES} bodies of {size / 1e6:.1f} MB, {name}"
        rows.append(Row(row, f"<= {LIMIT * 1000:.0f} ms", figure, p99(pings) <= LIMIT, commit()))
    return rows
