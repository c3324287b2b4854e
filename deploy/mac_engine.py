"""Entries of the Mac check about the engine: the embedded model on Metal, and the footprint during its answers."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.outcome import ROOT, Outcome, ToolError, create_outcome, create_skip
from wire.units import GIB, MIB, show_size

if TYPE_CHECKING:
    from node.engine.process.interface import Engine
    from wire.frames import Frame

MODEL = ROOT / "node" / "models" / "macpool-tiny"
"""Folder of the embedded model."""
ENGINE_TIMEOUT_SECONDS = 180.0
"""Maximum time of the engine process, in seconds."""
MAX_GROWTH_BYTES = 64 * MIB
"""Maximum bytes by which the growth of the footprint during the answers may exceed MLX's own count."""


SPIN = """
import mlx.core as mx
from node.engine.kv.kv_cache import evaluate
from node.engine.process.device_errors import is_device_error
source = "uint i = thread_position_in_grid.x; float x = a[i];" \\
    "for (uint n = 0; n < 4000000000u; n++) { x = fma(x, 1.0000001f, 1e-7f); } out[i] = x;"
kernel = mx.fast.metal_kernel(name="spin", input_names=["a"], output_names=["out"], source=source)
a = mx.ones((65536,))
try:
    sizes = {"grid": (65536, 1, 1), "threadgroup": (256, 1, 1)}
    made, = kernel(inputs=[a], output_shapes=[a.shape], output_dtypes=[a.dtype], **sizes)
    evaluate(made)
    mx.synchronize()
    print("no error")
except RuntimeError as error:
    print("device error" if is_device_error(error) else "another error", error, sep=": ")
"""
"""Program whose kernel runs on the GPU until macOS ends it."""


def check_engine_answers() -> Outcome:
    """Check that an engine process answers the trained prompts of the embedded model, and check its footprint.

    The entry passes if every answer is equal to the trained one, and the footprint grows at most `MAX_GROWTH_BYTES`
    more than MLX's own count. The entry is skipped without MLX. Raise `ToolError` if the process fails, and
    `subprocess.TimeoutExpired` after `ENGINE_TIMEOUT_SECONDS`.
    """
    if find_spec("mlx") is None:
        return create_skip("needs MLX: install the extra `node`")
    told = _run_engine()
    good = told["right"] == told["asked"] and told["phys"] - told["base"] < told["active"] + MAX_GROWTH_BYTES
    return create_outcome(
        good,
        f"{told['right']} of {told['asked']} word for word, {told['tokens_per_second']:.0f} tokens/s; footprint "
        f"{told['base'] / MIB:.0f} MiB before, {told['phys'] / MIB:.0f} after, MLX counts {told['active'] / MIB:.0f}",
    )


def check_footprint_falls(size: int = 2 * GIB) -> Outcome:
    """Check how long the footprint takes to fall after MLX has freed `size` bytes.

    The entry passes if the footprint falls by `RETURNED_SHARE` of `size` within `TRAILING_SECONDS` (both in
    `node.engine.memory.trailing`). The entry is skipped without MLX.
    """
    if find_spec("mlx") is None:
        return create_skip("needs MLX: install the extra `node`")
    import mlx.core as mx

    from node.engine.kv.kv_cache import evaluate
    from node.engine.memory.footprint import release_free_memory
    from node.engine.memory.trailing import RETURNED_SHARE, TRAILING_SECONDS
    from node.memory.sensor import open_sensor

    sensor = open_sensor(os.getpid())
    release_free_memory()
    base = sensor.read_footprint().phys or 0
    held = mx.random.uniform(shape=(size // 4,))
    evaluate(held)
    full = sensor.read_footprint().phys or 0
    del held
    release_free_memory()
    freed_at = time.monotonic()
    first = phys = sensor.read_footprint().phys or 0
    while phys > full - RETURNED_SHARE * size and time.monotonic() < freed_at + 2 * TRAILING_SECONDS:
        time.sleep(0.01)
        phys = sensor.read_footprint().phys or 0
    seconds = time.monotonic() - freed_at
    sensor.close()
    return create_outcome(
        seconds <= TRAILING_SECONDS,
        f"{show_size(full - base)} taken; {show_size(full - first)} had left the footprint at once, "
        f"{show_size(full - phys)} after {seconds:.2f} s",
    )


def check_device_error() -> Outcome:
    """Check that the engine recognizes the error of MLX after macOS has ended a command buffer.

    The entry passes if `node.engine.process.device_errors.is_device_error` is true for the exception. The entry is
    skipped without MLX or Metal. Raise `subprocess.TimeoutExpired` after `ENGINE_TIMEOUT_SECONDS`.
    """
    if find_spec("mlx") is None:
        return create_skip("needs MLX: install the extra `node`")
    import mlx.core as mx

    if not mx.metal.is_available():
        return create_skip("needs Metal")
    done = subprocess.run(
        [sys.executable, "-c", SPIN],
        capture_output=True,
        text=True,
        timeout=ENGINE_TIMEOUT_SECONDS,
        check=False,
        cwd=ROOT,
    )
    said = (done.stdout or done.stderr).strip().splitlines()
    last = said[-1] if said else "no output"
    return create_outcome(last.startswith("device error: "), f"{last}; exit code {done.returncode}")


def check_soft_end() -> Outcome:
    """Check that an engine process unloads its model and ends in time after a SIGTERM during an answer.

    The time limit is `node.engine.process.main.EXIT_TIMEOUT_SECONDS`. The entry is skipped without MLX.
    """
    from node.engine.process.main import EXIT_TIMEOUT_SECONDS, encode_settings
    from node.memory.sensor import open_machine
    from node.settings import ModelSettings, NodeSettings
    from wire.codec import Splitter, decode, encode
    from wire.frames import Deltas, Generate, GenerationParams, MemoryLimits, Message

    if find_spec("mlx") is None:
        return create_skip("needs MLX: install the extra `node`")
    settings = NodeSettings(models=ModelSettings(use_huggingface_cache=False, profile="off"))
    wired = open_machine(settings).read_wired
    before = wired()
    ours, theirs = socket.socketpair()
    with contextlib.closing(ours), tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "node.engine.process.main", "--socket", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
            cwd=ROOT,
        )
        theirs.close()
        try:
            ours.settimeout(ENGINE_TIMEOUT_SECONDS)
            request = Generate(
                1, 1, "r", MODEL.name, (Message("user", "Hello!"),), GenerationParams(max_tokens=10_000), 0
            )
            ours.sendall(
                encode_settings(settings) + encode(MemoryLimits(8 * GIB, 8 * GIB, 0, "static")) + encode(request)
            )
            splitter, writes = Splitter(), False
            while not writes and (piece := ours.recv(65536)):
                writes = any(isinstance(decode(tag, body), Deltas) for tag, body in splitter.feed(piece))
            child.terminate()
            began = time.monotonic()
            code = child.wait(2 * EXIT_TIMEOUT_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            return create_outcome(good=False, text=f"the engine did not write or did not end: {error}")
        finally:
            child.kill()
            child.wait()
        took, after = time.monotonic() - began, wired()
        errors.seek(0)
        unloaded = b"model unloaded" in errors.read()
    return create_outcome(
        code == 0 and unloaded and took < EXIT_TIMEOUT_SECONDS,
        f"ended with {code} after {took * 1000:.0f} ms, model given back: {unloaded}; wired before "
        f"{show_size(before)}, after {show_size(after)}",
    )


def _run_engine() -> dict[str, float]:
    command = [sys.executable, "-m", "deploy.mac_engine"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=ENGINE_TIMEOUT_SECONDS)
    if done.returncode:
        raise ToolError(f"the engine ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    return json.loads(done.stdout.splitlines()[-1])


def deliver_frame(engine: "Engine", frame: "Frame") -> "list[Frame]":
    """Pass a frame to an engine in this process, in place of the engine's threads. Return the immediate answers."""
    from node.engine.requests.tokenize_admission import UntokenizedPrompt

    said: list[Frame] = []
    works = [work] if (work := engine.prepare(frame)) is not None else []
    while works:
        for one in engine.handle(works.pop(), time.monotonic()):
            if isinstance(one, UntokenizedPrompt):
                works.append(one.tokenize())
            else:
                said.append(one)
    return said


def main() -> None:
    """Run the engine in this process with all trained prompts, and print the results as one line of JSON.

    An answer that is not complete after half of `ENGINE_TIMEOUT_SECONDS` counts as wrong.
    """
    from node.engine.build import build
    from node.engine.process.crash_recorder import CrashRecorder
    from node.memory.sensor import open_sensor
    from node.settings import MemorySettings, ModelSettings, NodeSettings
    from wire.frames import Channel, Deltas, Finished, Generate, GenerationParams, MemoryLimits, Message

    sensor = open_sensor(os.getpid())
    # after seconds with room the engine would take its emergency reserve, which MLX does not count
    settings = NodeSettings(models=ModelSettings(use_huggingface_cache=False), memory=MemorySettings(reserve="off"))
    engine = build(settings, CrashRecorder())
    engine.handle(MemoryLimits(8 * GIB, 8 * GIB, 0, "static"), time.monotonic())
    first = Generate(0, 0, "r", MODEL.name, (Message("user", "Hello!"),), GenerationParams(max_tokens=1), 0)
    deliver_frame(engine, first)
    while not any(isinstance(frame, Finished) for frame in chain.from_iterable(engine.step(time.monotonic()))):
        pass  # the first answer loads the model and the libraries
    base = sensor.read_footprint().phys or 0
    entries = [one for one in json.loads((Path(MODEL) / "answers.json").read_text()) if "system" not in one]
    texts = dict.fromkeys(range(1, len(entries) + 1), "")
    for number, one in enumerate(entries, 1):
        request = Generate(
            number, number, "r", MODEL.name, (Message("user", one["prompt"]),), GenerationParams(temperature=0.0), 0
        )
        deliver_frame(engine, request)
    open_, tokens, begun = set(texts), 0, time.monotonic()
    while open_ and time.monotonic() - begun < ENGINE_TIMEOUT_SECONDS / 2:
        for frame in chain.from_iterable(engine.step(time.monotonic())):
            if isinstance(frame, Deltas):
                for delta in frame.deltas:
                    tokens += len(delta.ids)
                    texts[delta.request] += "".join(
                        text for channel, text in delta.pieces if channel == Channel.CONTENT
                    )
            elif isinstance(frame, Finished):
                open_.discard(frame.request)
    seconds = time.monotonic() - begun
    memory = engine.report(time.monotonic()).memory
    right = sum(texts[number] == one["answer"] for number, one in enumerate(entries, 1))
    print(
        json.dumps(
            {
                "right": right,
                "asked": len(entries),
                "tokens_per_second": tokens / seconds,
                "base": base,
                "phys": memory.phys or 0,
                "active": memory.active,
            }
        )
    )


if __name__ == "__main__":
    main()
