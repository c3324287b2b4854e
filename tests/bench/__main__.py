"""Run the benchmarks. Each row has a target, a figure, a verdict, and its group, commit, date, machine and load.

All rows are written to bench-results.json. `python -m tests.bench` runs the plan in an hour at most: every group but
those of BY_NAME. `python -m tests.bench NAME…` runs only the groups with these names. The plan states how long each
group may take; the end of each group states it again.
"""

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import psutil

from tests.bench import begin, metrics, page, pull, simulation, video
from tests.bench.engine import disk, embed, tiers
from tests.bench.engine import rows as engine
from tests.bench.router import end_to_end, front, load
from tests.bench.router.front import STEP_MS, two_nodes
from tests.bench.row import Row, commit, machine, not_measured
from tests.support.cluster.hosts import Hosts, unsupported
from tests.support.processes import CLI, ROOT, environment, pool

THREADS = {"OPENBLAS_NUM_THREADS": "1"}
"""Environment of all engines, ours and the peers'. With two threads, OpenBLAS busy-waits on a machine of two cores."""


def bench_memory(folder: Path) -> list[Row]:
    """Measure the resident memory of coordinator and agent, and its growth from request 1,000 to 10,000."""
    with pool(folder) as made:
        ours = two_nodes(made, "step_ms=1")
        asyncio.run(load.plain(ours.base, made.key, 20, 50, 4))
        before = ours.process.memory_info().rss
        asyncio.run(load.plain(ours.base, made.key, 20, 450, 4))
        after = ours.process.memory_info().rss
        agent = max(psutil.Process(node.pid).memory_info().rss for node in made.nodes.values())
    mib = 1024 * 1024
    return [
        Row("coordinator RSS", "<= 120 MiB", f"{after / mib:.1f} MiB", after <= 120 * mib, commit()),
        Row(
            "coordinator growth, request 1,000 to 10,000",
            "<= 5 MiB",
            f"{(after - before) / mib:.2f} MiB",
            after - before <= 5 * mib,
            commit(),
        ),
        Row("agent RSS", "<= 80 MiB", f"{agent / mib:.1f} MiB", agent <= 80 * mib, commit()),
    ]


def bench_idle(folder: Path) -> list[Row]:
    """Measure CPU and wake-ups of an idle agent and an idle coordinator."""
    with pool(folder) as made:
        ours = two_nodes(made)
        watched = {"idle agent": psutil.Process(made.nodes["one"].pid), "idle coordinator": ours.process}
        time.sleep(3)
        before, began = {name: _used(process) for name, process in watched.items()}, time.monotonic()
        time.sleep(30)
        seconds = time.monotonic() - began
        after = {name: _used(process) for name, process in watched.items()}
    rows: list[Row] = []
    for name in watched:
        (begun, slept), (ended, woken) = before[name], after[name]
        share = (ended - begun) / seconds
        figure = f"{share * 100:.2f} % CPU, {(woken - slept) / seconds:.1f} wake-ups/s"
        rows.append(Row(name, "<= 0.3 % CPU", figure, share <= 0.003, commit()))
    return rows


def _used(process: psutil.Process) -> tuple[float, int]:
    """Return the CPU seconds and the voluntary context switches of a process."""
    return sum(process.cpu_times()[:2]), process.num_ctx_switches().voluntary


def bench_help(_: Path) -> list[Row]:
    """Measure the CPU time of `cluster --help`."""
    figures: list[float] = []
    for _round in range(9):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*CLI, "--help"], check=True, capture_output=True, env=environment())
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        figures.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    median = statistics.median(figures)
    return [Row("cluster --help", "<= 0.15 s CPU", f"{median:.3f} s", median <= 0.15, commit())]


def bench_doctor(folder: Path) -> list[Row]:
    """Measure `cluster doctor` on a machine in no cluster, with all checks at once."""
    seconds: list[float] = []
    for _round in range(5):
        began = time.monotonic()
        subprocess.run([*CLI, "doctor", "--state", str(folder / "none")], capture_output=True, env=environment())
        seconds.append(time.monotonic() - began)
    worst = max(seconds)
    return [
        Row(
            "cluster doctor",
            "<= 5 s",
            f"{worst:.2f} s, median {statistics.median(seconds):.2f} s",
            worst <= 5.0,
            commit(),
        )
    ]


def bench_parts(folder: Path) -> list[Row]:
    """Measure how far a long answer over a link of 100 Mbit/s changes the gaps between tokens of streams."""
    target = "ITL p99 moves by <= 50 ms"
    reason = unsupported()
    if reason:
        return [Row("100 MB of parts", target, f"not measured: {reason}", False, commit())]
    with Hosts(folder, 2) as hosts, pool(folder) as made, hosts[1].threads(1) as inside:
        made.call = lambda ask: inside.submit(ask).result()
        made.up("http.tls=off", cluster_listen=f"{hosts[1].ip}:0", listen=f"{hosts[1].ip}:0", wrap=hosts[1].enter())
        clock = (f"engine.scripted.step_ms={STEP_MS}", "engine.scripted.text=clock")
        made.join("far", *clock, wrap=hosts[2].enter())
        log = folder / "far" / "logs" / "node.log"
        with log.open("ab") as file:
            for _ in range(100):
                file.write(b"x" * 999_999 + b"\n")
        hosts.shape(hosts[2], "100mbit")
        script = [*hosts[1].enter(), sys.executable, "-m", "tests.bench.parts", made.base, made.key, made.secret]
        done = subprocess.run(script, capture_output=True, text=True, env=environment(), cwd=ROOT, timeout=300)
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)
        found = json.loads(done.stdout)
    moved = (found["beside"] - found["alone"]) * 1000
    figure = (
        f"{moved:.1f} ms (p99 {found['alone'] * 1000:.1f} alone, {found['beside'] * 1000:.1f} during "
        f"{found['bytes'] / 1e6:.0f} MB in {found['seconds']:.1f} s)"
    )
    return [Row("100 MB of parts over 100 Mbit/s", target, figure, moved <= 50, commit())]


GROUPS: dict[str, Callable[[Path], list[Row]]] = {
    "begin": begin.bench_begin,
    "help": bench_help,
    "doctor": bench_doctor,
    "idle": bench_idle,
    "memory": bench_memory,
    "metrics": metrics.bench_metrics,
    "page": page.bench_page,
    "parts": bench_parts,
    "pull": pull.bench_pull,
    "simulation": simulation.bench_simulation,
    **video.GROUPS,
    **front.GROUPS,
    **engine.GROUPS,
    "embed": embed.bench_embed,
    "cache": disk.bench_cache,
    "tiers": tiers.bench_tiers,
    "end": end_to_end.bench_end_to_end,
}
BY_NAME = frozenset({"simulation", "embed", "cache", "tiers"})
"""Groups outside the plan, which has an hour. Almost all figures of `simulation` are the same on every machine, because
it runs in virtual time."""
BUDGETS = {
    "begin": 90,
    "help": 10,
    "doctor": 30,
    "idle": 40,
    "memory": 60,
    "metrics": 20,
    "page": 60,
    "parts": 60,
    "pull": 200,
    "simulation": 900,
    "video": 480,
    "stream": 210,
    "plain": 70,
    "bodies": 170,
    "apart": 20,
    "delay": 60,
    "many": 30,
    "refusing": 20,
    "decode": 60,
    "server": 90,
    "itl": 240,
    "cancel": 60,
    "gate": 20,
    "prefix": 170,
    "estimate": 120,
    "torture": 420,
    "pressure": 240,
    "tokenize": 40,
    "grammar": 60,
    "steady": 160,
    "embed": 240,
    "cache": 400,
    "tiers": 120,
    "end": 200,
}
"""Seconds that each group may take on two quiet cores; those of the plan make an hour at most."""


def plan() -> list[str]:
    """Return the groups that run where none is named."""
    return [name for name in GROUPS if name not in BY_NAME]


def main() -> int:
    """Run the groups and write the rows. Return the exit code: 1 if a row misses its target, otherwise 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("groups", nargs="*", metavar="NAME", help=f"{', '.join(GROUPS)}; default: the plan")
    names: list[str] = parser.parse_args().groups or plan()
    if unknown := [name for name in names if name not in GROUPS]:
        parser.error(f"no group {', '.join(unknown)}: the groups are {', '.join(GROUPS)}")
    stamp = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
        "load": os.getloadavg()[0],
    }
    print(", ".join(f"{name} {value}" for name, value in (*stamp.items(), ("commit", commit()))))
    print(f"{len(names)} groups, {sum(BUDGETS[name] for name in names) / 60:.0f} minutes at most", flush=True)
    os.environ |= THREADS
    rows: list[dict[str, object]] = []
    for name in names:
        began = time.monotonic()
        for row in _rows(name):
            rows.append({"group": name, **asdict(row), **stamp})
            print(f"{'ok  ' if row.ok else 'MISS'} {row.name}: {row.figure} (target {row.target})", flush=True)
        print(f"     {name} took {time.monotonic() - began:.0f} s of {BUDGETS[name]}", flush=True)
    (ROOT / "bench-results.json").write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(row["ok"] for row in rows) else 1


def _rows(name: str) -> list[Row]:
    """Run a group. A group that raises is a miss, and the remaining groups run."""
    with tempfile.TemporaryDirectory(prefix="mp-bench-") as folder:
        try:
            return GROUPS[name](Path(folder))
        except Exception as error:
            traceback.print_exc()
            return [not_measured(name, "measured", str(error))]


if __name__ == "__main__":
    sys.exit(main())
