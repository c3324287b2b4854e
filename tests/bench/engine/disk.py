"""Rows of the prefix cache: warm prompts, restored prompts of six architectures, writes during decoding, its index.

`python -m tests.bench.engine.disk fill|restore MODEL FOLDER` answers one long prompt in a process of its own. It
prints seconds, tokens and cached tokens as JSON, and after `fill` waits to be killed.
`python -m tests.bench.engine.disk beside MODEL FOLDER` decodes eight rows in turn with and without writes, and prints
the gaps of each round.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from node.engine.kv.disk.block_chain import BlockName, compute_chain, compute_root
from node.engine.kv.disk.block_file import BlockPart
from node.engine.kv.disk.block_index import BlockIndex
from node.engine.kv.radix_trie import pack
from tests import models
from tests.bench.engine.rows import missing
from tests.bench.engine.warm import bench_warm
from tests.bench.row import Row, commit, not_measured, p99, ratio_of, spread
from tests.support.engine.disk import answer, get_disk, open_driver, words, write_all
from tests.support.engine.text_engine import Driver
from tests.support.processes import ROOT, environment
from wire.frames import Finished, GenerationParams

ARCHITECTURES = ("llama", "qwen3", "qwen3_moe", "gemma3_text", "lfm2", "qwen3_next")
PROMPT_WORDS = 1000
CHAIN_TOKENS = 60_000
FILES = 100_000
WIDTH = 8
ROUNDS = 12
STEPS = 100
"""Tokens of each row in a round. With 60, the p99 of 8 rounds was the fifth longest of 472 gaps."""
TIMEOUT_SECONDS = 600


def bench_cache(folder: Path) -> list[Row]:
    """Measure restored and warm prompts, writes during decoding, and the index of the disk cache."""
    folder.mkdir(exist_ok=True)
    rows = [_bench_chain(), _bench_scan(folder / "scan")]
    if missing():
        return [*rows, not_measured("disk cache of models", "measured", missing())]
    for architecture in ARCHITECTURES:
        rows += _bench_restore(architecture, folder / architecture)
    return [*rows, *bench_warm(folder), *_bench_beside(folder / "beside")]


def _bench_chain() -> Row:
    key, index = pack(range(CHAIN_TOKENS)), BlockIndex()
    root = compute_root("model", "versions", "scope")
    for link in compute_chain(root, key)[1:]:
        index.add(BlockName("model", BlockPart.TOKENS, link), 1)
    seconds = list[float]()
    for _ in range(20):
        began = time.perf_counter()
        index.count_blocks("model", compute_chain(root, key))
        seconds.append(time.perf_counter() - began)
    best = min(seconds)
    return Row(
        f"disk cache: lookup of {CHAIN_TOKENS} tokens",
        "<= 1 ms",
        f"{best * 1000:.2f} ms (median {statistics.median(seconds) * 1000:.2f})",
        best <= 0.001,
        commit(),
    )


def _bench_scan(folder: Path) -> Row:
    model = folder / "model"
    model.mkdir(parents=True)
    for number in range(FILES):
        (folder / BlockName("model", BlockPart.TOKENS, number.to_bytes(16)).file).touch()
    seconds = list[float]()
    for _ in range(3):
        index, began = BlockIndex(), time.perf_counter()
        index.scan(folder, clean=False)
        seconds.append(time.perf_counter() - began)
        assert len(index) == FILES
    best = min(seconds)
    return Row(f"disk cache: scan of {FILES} files", "<= 1 s", f"{best:.2f} s", best <= 1.0, commit())


def _run(*arguments: object) -> list[dict[str, Any]]:
    """Run this module in a process of its own; return the objects that it prints."""
    done = subprocess.run(
        [sys.executable, "-m", __name__, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=TIMEOUT_SECONDS,
        env=environment(**models.fast_blas()),
    )
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _fill_and_kill(model: Path, folder: Path) -> dict[str, float]:
    """Fill a folder in a separate process, kill the process at rest, and return the object that it printed."""
    command = [sys.executable, "-m", __name__, "fill", str(model), str(folder)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment(**models.fast_blas())
    ) as process:
        assert process.stdout is not None
        line = next((line for line in process.stdout if line.startswith("{")), "")
        process.send_signal(signal.SIGKILL)
    if not line:
        raise RuntimeError(f"{command} printed nothing")
    return json.loads(line)


def _bench_restore(architecture: str, folder: Path) -> list[Row]:
    model = models.path(architecture, trained=False, preset="bench50m")
    cold, (warm,) = _fill_and_kill(model, folder), _run("restore", model, folder)
    share, ratio = warm["cached"] / warm["tokens"], warm["seconds"] / cold["seconds"]
    prefilled = warm["tokens"] - warm["cached"]
    return [
        Row(
            f"disk cache: restored prompt of {architecture}",
            ">= 0.9 of the prompt, the rest prefilled",
            f"{share:.3f} of {warm['tokens']:.0f} tokens, {warm['prefilled']:.0f} prefilled",
            share >= 0.9 and warm["prefilled"] == prefilled,
            commit(),
        ),
        Row(
            f"disk cache: first token of {architecture} from the disk",
            "<= 0.20 x cold",
            f"{ratio:.2f} x ({warm['seconds']:.2f} against {cold['seconds']:.2f} s)",
            ratio <= 0.20,
            commit(),
        ),
    ]


def _bench_beside(folder: Path) -> list[Row]:
    rounds = _run("beside", models.path("llama", trained=False, preset="bench50m"), folder)
    pairs = [(one["writing"], one["plain"]) for one in rounds]
    speeds = [(WIDTH * len(writing) / sum(writing), WIDTH * len(plain) / sum(plain)) for writing, plain in pairs]
    ours, theirs, speed, ratios = ratio_of(speeds)
    slow, usual = (p99([gap for gaps in side for gap in gaps]) for side in zip(*pairs, strict=True))
    parts = sum(one["parts"] for one in rounds)
    name = f"disk cache: writes beside {WIDTH} rows"
    return [
        Row(
            name,
            ">= 0.97 x tokens per second",
            f"{speed:.3f} x ({ours:.1f} against {theirs:.1f}; by round {spread(ratios)}; {parts:.0f} parts)",
            speed >= 0.97 and parts >= ROUNDS,
            commit(),
        ),
        Row(
            f"{name}, gaps",
            "<= 1.1 x ITL p99",
            f"{slow / usual:.2f} x ({slow * 1000:.1f} against {usual * 1000:.1f} ms, all rounds)",
            slow <= 1.1 * usual,
            commit(),
        ),
    ]


def _time_prompt(model: Path, folder: Path) -> None:
    """Answer the prompt after a short one that loads the model.

    Print the seconds to the first token of the prompt, and its token counts.
    """
    driver = open_driver(model, folder)
    brief = GenerationParams(temperature=0.0, max_tokens=2)
    driver.end(driver.ask("Hello!", brief))
    before, began = driver.engine.report(0.0).counts.prefill_tokens, time.monotonic()
    number = driver.ask(words(PROMPT_WORDS), brief)
    driver.until(lambda: driver.ids[number, 0])
    seconds = time.monotonic() - began
    end = driver.end(number)
    assert isinstance(end, Finished), end
    prefilled = driver.engine.report(0.0).counts.prefill_tokens - before
    write_all(driver)
    print(
        json.dumps(
            {"seconds": seconds, "tokens": end.prompt_tokens, "cached": end.cached_tokens, "prefilled": prefilled}
        )
    )


def _time_beside(model: Path, folder: Path) -> None:
    """Print the gaps of pairs of rounds, without writes and while a prompt is written. Every second pair begins with
    the writes. A pair before the first is not counted."""
    driver = open_driver(model, folder)
    answer(driver, words(3 * PROMPT_WORDS))
    write_all(driver)
    tier = driver.engine.parts.prefix_cache.disk
    entry = max(driver.engine.parts.prefix_cache.entries, key=lambda entry: entry.length)
    for number in range(ROUNDS + 1):
        found = dict[str, object]()
        for side in ("plain", "writing") if number % 2 else ("writing", "plain"):
            before = driver.engine.report(0.0).cache.disk_persisted
            if side == "writing":
                get_disk(driver).clear("")
                tier.offer(driver.resident(), entry)
            found[side] = _measure_gaps(driver)
            write_all(driver)
            if side == "writing":
                found["parts"] = driver.engine.report(0.0).cache.disk_persisted - before
        if number:
            print(json.dumps(found))


def _measure_gaps(driver: Driver) -> list[float]:
    """Decode eight rows; return the seconds between their tokens."""
    bias = tuple((token, -100.0) for token in driver.tokenizer().eos)
    many = GenerationParams(temperature=1.0, max_tokens=STEPS, seed=1, logit_bias=bias)
    asked = [driver.ask("Hello!", many) for _ in range(WIDTH)]
    driver.until(lambda: all(driver.ids[one, 0] for one in asked))
    gaps, at = list[float](), time.perf_counter()
    while all(len(driver.ids[one, 0]) < STEPS - 1 for one in asked):
        length = len(driver.ids[asked[0], 0])
        driver.until(lambda length=length: len(driver.ids[asked[0], 0]) > length)
        at, before = time.perf_counter(), at
        gaps.append(at - before)
    for one in asked:
        driver.end(one)
    return gaps


def _wait_to_be_killed() -> None:
    sys.stdout.flush()
    while os.getppid() != 1:
        time.sleep(1)


ACTS: dict[str, Callable[[Path, Path], None]] = {"fill": _time_prompt, "restore": _time_prompt, "beside": _time_beside}

if __name__ == "__main__":
    ACTS[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
    if sys.argv[1] == "fill":
        _wait_to_be_killed()
