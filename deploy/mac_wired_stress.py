"""Entry of the Mac check that may panic the Mac: two streams with buffer churn, unwired and then wired.

The entry repeats the controlled test of https://github.com/ml-explore/mlx/issues/3186 with Macpool's engine, for a
bounded time. The load is two streams of unique long prompts with long and short answers, and a prefix cache that
overflows. In the issue, the server of mlx-lm panicked the Mac after 102 to 108 s with a wired limit, and never without
a limit. Unverified on macOS.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from deploy.mac_engine import deliver_frame
from deploy.outcome import ROOT, Outcome, ToolError, create_outcome, create_skip
from wire.units import show_size

MODEL_VARIABLE = "MACPOOL_CHECK_MODEL"
"""Environment variable with the folder of a model, ideally of at least a quarter of the Mac's memory."""
RUN_SECONDS = 240.0
"""Duration of each of the two runs after the model load in seconds: more than twice the time to the panic."""
LOAD_TIMEOUT_SECONDS = 1800.0
"""Maximum time to load the model, in seconds."""
WORDS = 12_000
"""Number of words in a prompt."""
ANSWERS = (16, 400)
"""Tokens of a short answer, and of a long answer."""
STREAMS = 2
"""Number of concurrent requests."""
CACHE = "1GiB"
"""Size of the prefix cache, which a few of the prompts fill."""
PROGRESS = Path("mac-check-wired.log")
"""File with the progress, synced to the disk every `PROGRESS_SECONDS`, because the file must survive a panic."""
PROGRESS_SECONDS = 5.0
"""Seconds between two lines of the progress."""


def check_wired_stress() -> Outcome:
    """Run the workload with `memory.wire` off and then on, each in a separate process.

    The entry passes if both processes end without an error. It is skipped without the variable `MODEL_VARIABLE`. Raise
    `ToolError` if a process fails, and `subprocess.TimeoutExpired` if it does not end in time.
    """
    model = os.environ.get(MODEL_VARIABLE)
    if not model:
        return create_skip(f"set {MODEL_VARIABLE} to the folder of a large model")
    texts: list[str] = []
    for wire in ("off", "on"):
        result = _run_process(Path(model), wire)
        texts.append(
            f"{wire}: wired {show_size(int(result['wired']))}, {result['requests']} requests, {result['evictions']} "
            f"evictions, {result['speed']:.1f} tokens/s in {result['seconds']:.0f} s"
        )
    return create_outcome(good=True, text="; ".join(texts))


def _run_process(model: Path, wire: str) -> dict[str, float]:
    command = [sys.executable, "-m", "deploy.mac_wired_stress", str(model.expanduser().resolve()), "--wire", wire]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=LOAD_TIMEOUT_SECONDS + 2 * RUN_SECONDS
    )
    if done.returncode:
        raise ToolError(f"memory.wire = {wire}: the engine ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Run the workload once in this process, and print the results as one line of JSON.

    Raise the errors of `run_churn`.
    """
    parser = argparse.ArgumentParser(prog="mac_wired_stress")
    parser.add_argument("model", type=Path)
    parser.add_argument("--wire", choices=["on", "off"], required=True)
    options = parser.parse_args()
    print(json.dumps(run_churn(options.model, options.wire, PROGRESS)))


def run_churn(
    model: Path, wire: str, progress: Path, *, seconds: float = RUN_SECONDS, words: int = WORDS, cache_size: str = CACHE
) -> dict[str, float]:
    """Load the model in a folder into an engine in this process, and run two streams for `seconds`.

    `wire` is the setting `memory.wire`, `words` the length of a prompt, and `cache_size` the size of the prefix cache.
    The progress is appended to the file `progress`. Return the number of `requests` and prefix `evictions`, the `wired`
    bytes, the `seconds`, and the `speed` in tokens per second. Raise `ToolError` if the model cannot be loaded, OSError
    if `progress` cannot be written.
    """
    from node.engine.build import build
    from node.engine.process.crash_recorder import CrashRecorder
    from node.memory.cap import resolve_cap, resolve_margin
    from node.memory.sensor import open_machine
    from node.settings import EngineSettings, MemorySettings, MlxSettings, ModelSettings, NodeSettings
    from wire.frames import (
        Deltas,
        Finished,
        Frame,
        Generate,
        GenerationParams,
        LoadModel,
        MemoryLimits,
        Message,
        Refusal,
    )

    settings = NodeSettings(
        memory=MemorySettings(wire=wire),
        engine=EngineSettings(mlx=MlxSettings(prefix_cache_size=cache_size)),
        models=ModelSettings(folders=(str(model.parent),), use_huggingface_cache=False, profile="off", trial=False),
    )
    cap = resolve_cap("auto", "balanced", open_machine(settings).read_bounds()).bytes
    engine = build(settings, CrashRecorder())
    draw = random.Random(0)  # noqa: S311  prompts, not secrets
    number = tokens = 0
    ended: set[int] = set()

    def process_frames(frames: Iterable[object]) -> None:
        nonlocal tokens
        for frame in frames:
            if isinstance(frame, Deltas):
                tokens += sum(len(delta.ids) for delta in frame.deltas)
            elif isinstance(frame, Refusal) and not frame.request:
                raise ToolError(frame.refused.message)
            elif isinstance(frame, Finished | Refusal):
                ended.add(frame.request)

    def deliver(frame: Frame) -> None:
        process_frames(deliver_frame(engine, frame))

    def create_request() -> Generate:
        text = " ".join(draw.choices(("river", "stone", "seven", "green", "ask", "who", "ten", "far"), k=words))
        limit = draw.choice(ANSWERS)
        return Generate(
            number, number, "r", model.name, (Message("user", text),), GenerationParams(max_tokens=limit), 0, limit
        )

    deliver(MemoryLimits(cap, cap, resolve_margin("auto", cap).bytes, "auto"))
    deliver(LoadModel(0, model.name))
    while not ended:
        process_frames(chain.from_iterable(engine.step(time.monotonic())))
    begun = written_at = time.monotonic()
    while (now := time.monotonic()) < begun + seconds:
        while 1 + number - len(ended) < STREAMS:  # `ended` includes the load
            number += 1
            deliver(create_request())
        process_frames(chain.from_iterable(engine.step(time.monotonic())))
        if now - written_at >= PROGRESS_SECONDS:
            written_at = now
            _append_progress(
                progress, f"memory.wire = {wire}: {now - begun:.0f} s, {len(ended) - 1} requests, {tokens} tokens"
            )
    _append_progress(progress, f"memory.wire = {wire}: ended well after {seconds:.0f} s")
    report = engine.report(time.monotonic())
    return {
        "wired": report.wired,
        "requests": len(ended) - 1,
        "seconds": seconds,
        "speed": tokens / seconds,
        "evictions": report.cache.evictions,
    }


def _append_progress(progress: Path, line: str) -> None:
    with progress.open("a") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())


if __name__ == "__main__":
    main()
