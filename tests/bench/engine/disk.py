"""Rows of the disk cache: restored prompts of six architectures, writes during eight rows, and the index.

`python -m tests.bench.engine.disk fill|restore MODEL FOLDER` answers one long prompt in a process of its own and prints
seconds, tokens and cached tokens as JSON. `python -m tests.bench.engine.disk beside MODEL FOLDER` decodes eight rows in
turn with and without writes, and prints the steps of each round.
"""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from node.engine.kv.disk.block_chain import BlockName, compute_chain, compute_root
from node.engine.kv.disk.block_file import BlockPart
from node.engine.kv.disk.block_index import BlockIndex
from node.engine.kv.radix_trie import pack
from tests import models
from tests.bench.engine.rows import missing
from tests.bench.row import Row, commit, not_measured, p99
from tests.support.engine.disk import answer, get_disk, open_driver, words, write_all
from tests.support.processes import ROOT, environment
from wire.frames import Finished, GenerationParams

ARCHITECTURES = ("llama", "qwen3", "qwen3_moe", "gemma3_text", "lfm2", "qwen3_next")
PROMPT_WORDS = 1000
CHAIN_TOKENS = 60_000
FILES = 100_000
WIDTH = 8
ROUNDS = 6
STEPS = 120
"""Tokens of each row in a round."""
TIMEOUT_SECONDS = 600


def bench_cache(folder: Path) -> list[Row]:
    """Measure restored prompts, writes during decoding, and the index of the disk cache."""
    rows = [_bench_chain(), _bench_scan(folder / "scan")]
    if missing():
        return [*rows, not_measured("disk cache of models", "measured", missing())]
    for architecture in ARCHITECTURES:
        rows += _bench_restore(architecture, folder / architecture)
    return [*rows, *_bench_beside(folder / "beside")]


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


def _run(*arguments: object) -> list[dict[str, float]]:
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


def _bench_restore(architecture: str, folder: Path) -> list[Row]:
    model = models.path(architecture, trained=False, preset="bench50m")
    (cold,), (warm,) = _run("fill", model, folder), _run("restore", model, folder)
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
    plain, writing = rounds[::2], rounds[1::2]
    speed = statistics.median(ours["speed"] / theirs["speed"] for ours, theirs in zip(writing, plain, strict=True))
    gap = statistics.median(ours["p99"] / theirs["p99"] for ours, theirs in zip(writing, plain, strict=True))
    parts = sum(ours["parts"] for ours in writing)
    name = f"disk cache: writes beside {WIDTH} rows"
    return [
        Row(
            name,
            ">= 0.97 x tokens per second",
            f"{speed:.3f} x ({parts:.0f} parts)",
            speed >= 0.97 and parts >= ROUNDS,
            commit(),
        ),
        Row(f"{name}, gaps", "<= 1.1 x ITL p99", f"{gap:.2f} x", gap <= 1.1, commit()),
    ]


def _time_prompt(model: Path, folder: Path) -> None:
    """Answer the prompt after a short one, so that the model is loaded; print its first token's time."""
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
    """Print speed, gaps and written parts of each round: without writes, then with a prompt that is being written."""
    driver = open_driver(model, folder)
    driver.end(driver.ask("Hello!", GenerationParams(max_tokens=1)))
    bias = tuple((token, -100.0) for token in driver.tokenizer().eos)
    many = GenerationParams(temperature=1.0, max_tokens=STEPS, seed=1, logit_bias=bias)
    for number in range(2 * ROUNDS):
        answer(driver, words(2 * PROMPT_WORDS, seed=number))
        if not number % 2:
            write_all(driver)
        before = driver.engine.report(0.0).cache.disk_saves
        asked = [driver.ask("Hello!", many) for _ in range(WIDTH)]
        driver.until(lambda asked=asked: all(driver.ids[one, 0] for one in asked))
        gaps, began = list[float](), time.perf_counter()
        first = sum(len(driver.ids[one, 0]) for one in asked)
        while all(len(driver.ids[one, 0]) < STEPS - 1 for one in asked):
            at, length = time.perf_counter(), len(driver.ids[asked[0], 0])
            driver.until(lambda asked=asked, length=length: len(driver.ids[asked[0], 0]) > length)
            gaps.append(time.perf_counter() - at)
        tokens = sum(len(driver.ids[one, 0]) for one in asked) - first
        speed, parts = tokens / (time.perf_counter() - began), driver.engine.report(0.0).cache.disk_saves - before
        print(json.dumps({"speed": speed, "p99": p99(gaps), "parts": parts}))
        for one in asked:
            driver.end(one)
        write_all(driver)
    assert get_disk(driver).files


if __name__ == "__main__":
    act, place, disk = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    (_time_beside if act == "beside" else _time_prompt)(place, disk)
