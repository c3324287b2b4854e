"""Entries of the Mac check about the engine: the embedded model on Metal, and what its footprint does meanwhile."""

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from deploy.outcome import ROOT, Outcome, ToolError, judged, skipped
from wire.units import MIB

MODEL = ROOT / "node" / "models" / "macpool-tiny"
SECONDS = 180.0
GAP = 64 * MIB
"""Bytes by which footprint and MLX's own count may move apart while prompts are written and given back."""


def engine_answers() -> Outcome:
    """Let the text engine answer all that the embedded model knows by heart, eight at once, in a process of its own."""
    if find_spec("mlx") is None:
        return skipped("needs MLX: install the extra `node`")
    told = _ask_the_engine()
    good = told["right"] == told["asked"] and told["phys"] - told["base"] < told["active"] + GAP
    return judged(
        good,
        f"{told['right']} of {told['asked']} word for word, {told['tokens_per_second']:.0f} tokens/s; footprint "
        f"{told['base'] / MIB:.0f} MiB before, {told['phys'] / MIB:.0f} after, MLX counts {told['active'] / MIB:.0f}",
    )


def _ask_the_engine() -> dict[str, float]:
    command = [sys.executable, "-m", "deploy.mac_engine"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=SECONDS)
    if done.returncode:
        raise ToolError(f"the engine ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Run the engine in this process and print what was seen as one line of JSON."""
    from node.engine.recorder import Recorder
    from node.engine.text import build
    from node.memory.sensor import open_sensor
    from node.settings import ModelSettings, NodeSettings
    from wire.frames import Channel, Deltas, Finished, Generate, Limits, Message, Params
    from wire.units import GIB

    sensor = open_sensor(os.getpid())
    engine = build(NodeSettings(models=ModelSettings(hub=False)), Recorder())
    base = sensor.phys().phys or 0
    engine.take(Limits(8 * GIB, 8 * GIB, 0, "static"), time.monotonic())
    entries = [one for one in json.loads((Path(MODEL) / "answers.json").read_text()) if "system" not in one]
    texts = dict.fromkeys(range(1, len(entries) + 1), "")
    for number, one in enumerate(entries, 1):
        request = Generate(
            number, number, "r", MODEL.name, (Message("user", one["prompt"]),), Params(temperature=0.0), 0
        )
        work = engine.prepare(request)
        if work is not None:
            engine.take(work, time.monotonic())
    open_, tokens, begun = set(texts), 0, time.monotonic()
    while open_ and time.monotonic() - begun < SECONDS / 2:
        for frame in engine.step(time.monotonic()):
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
    print(json.dumps({
        "right": right, "asked": len(entries), "tokens_per_second": tokens / seconds, "base": base,
        "phys": memory.phys or 0, "active": memory.active,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
