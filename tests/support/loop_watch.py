"""Measure the longest time that one callback held an asyncio loop, for abuse tests: no peer may hold it beyond 50 ms.

Two watches, one for each place where a loop runs:

    with watch_loop() as held:                 # the loop of this test
        await attack()
    assert held.seconds < max_held_seconds()

    with watch_server(running.base, running.coordinator.pid) as held:   # a coordinator in its own process
        await attack()
    assert held.seconds < max_held_seconds()

`seconds` is final at the end of the block. The machine of the tests is shared, and a process that does not get a core
looks like a held loop. Each gap therefore counts as the smaller of its wall time and the CPU time that the watched
process used during it. `wall_seconds` is the longest gap without that correction, as a client experiences it. It also
shows a loop that sleeps or waits for a disk. A shared machine computes at half its speed for minutes at
times. The limit therefore grows with the current duration of a fixed piece of work.

`watch_loop` runs a ticker on the loop. `watch_server` sends `GET /livez` on one keep-alive connection: a held loop
answers late. A process of its own sends the requests, because the test's process is often busier than the server. Where
the kernel has no `/proc/PID/task/*/schedstat` the CPU time is not known, and both figures are wall time.
"""

import asyncio
import json
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

MAX_HELD_SECONDS = 0.050
"""The longest time for which one request or one frame of any peer may hold the loop, on a machine at full speed."""
FULL_SPEED_SECONDS = 0.0025
"""CPU time of `_work` on the two-core machines for which MAX_HELD_SECONDS is stated."""
TICK_SECONDS = 0.002
_REQUEST = b"GET /livez HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"


@dataclass(slots=True)
class Held:
    """The longest gap. `ticks` counts the measurements, because a test must know that there were some."""

    seconds: float = 0.0
    wall_seconds: float = 0.0
    ticks: int = 0

    def add(self, wall: float, cpu: float) -> None:
        """Count one gap."""
        self.ticks += 1
        self.wall_seconds = max(self.wall_seconds, wall)
        self.seconds = max(self.seconds, min(wall, cpu))


def max_held_seconds() -> float:
    """Return MAX_HELD_SECONDS for the current speed of this machine: more while it is slower than full speed, never
    less."""
    return MAX_HELD_SECONDS * max(1.0, median(_work() for _ in range(5)) / FULL_SPEED_SECONDS)


def _work() -> float:
    """Parse one MiB of escapes; return the CPU seconds that it took."""
    text = '"' + "\\n" * (1 << 19) + '"'
    began = time.thread_time()
    json.loads(text)
    return time.thread_time() - began


@contextmanager
def watch_loop() -> Iterator[Held]:
    """Watch the running loop of this process until the end of the block."""
    held = Held()
    loop = asyncio.get_running_loop()
    due, cpu = time.monotonic() + TICK_SECONDS, time.process_time()

    def count() -> None:
        held.add(max(0.0, time.monotonic() - due), time.process_time() - cpu)

    def tick() -> None:
        nonlocal due, cpu, timer
        count()
        due, cpu = time.monotonic() + TICK_SECONDS, time.process_time()
        timer = loop.call_later(TICK_SECONDS, tick)

    timer = loop.call_later(TICK_SECONDS, tick)
    try:
        yield held
    finally:
        timer.cancel()
        count()


@contextmanager
def watch_server(base_url: str, pid: int) -> Iterator[Held]:
    """Watch the loop of the coordinator process `pid`, which serves plain HTTP at `base_url`, from outside.

    Raise AssertionError if the server refuses or ends the connection of the watch.
    """
    where, held = urlsplit(base_url), Held()
    command = [sys.executable, "-P", __file__, str(where.hostname), str(where.port), str(pid)]
    asking = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert asking.stdout is not None
    assert asking.stdin is not None
    try:
        assert asking.stdout.readline() == "watching\n", "the server did not answer /livez"
        yield held
        asking.stdin.close()
        found = json.loads(asking.stdout.read() or "{}")
        assert "ticks" in found, f"the watch's connection ended: {found}"
        held.seconds, held.wall_seconds, held.ticks = found["seconds"], found["wall_seconds"], found["ticks"]
    finally:
        asking.kill()
        asking.wait()
        asking.stdin.close()
        asking.stdout.close()


def cpu_clock(pid: int) -> Callable[[], float]:
    """Return a clock of the CPU seconds of all threads of a process.

    If the kernel does not report them, each step of the clock is longer than any wall time.
    """
    tasks = Path(f"/proc/{pid}/task")

    def spent() -> float:
        total = 0
        for task in tasks.iterdir():
            try:
                total += int((task / "schedstat").read_text().split()[0])
            except OSError:  # a thread that has just ended
                continue
        return total / 1e9

    return spent if (tasks / str(pid) / "schedstat").exists() else lambda: time.monotonic() * 1e9


def _ask_until_closed(host: str, port: int, pid: int) -> None:
    """Send requests until standard input is closed, then print the result."""
    held, spent = Held(), cpu_clock(pid)
    try:
        with socket.create_connection((host, port), timeout=60) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                began, cpu = time.monotonic(), spent()
                connection.sendall(_REQUEST)
                answer = b""
                while b'{"status":"ok"}' not in answer:
                    more = connection.recv(4096)
                    if not more:
                        raise ConnectionError(f"closed after {held.ticks} answers: {answer[:200]!r}")
                    answer += more
                held.add(time.monotonic() - began, spent() - cpu)
                if held.ticks == 1:
                    print("watching", flush=True)
                if select.select([sys.stdin], [], [], TICK_SECONDS)[0]:
                    break
    except OSError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    found = {"seconds": held.seconds, "wall_seconds": held.wall_seconds, "ticks": held.ticks}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    _ask_until_closed(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
