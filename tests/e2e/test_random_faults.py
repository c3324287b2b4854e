"""Random faults of Macs and their network during chats. The seed of a day draws other faults."""

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.effort import SEED
from tests.support.cluster.hosts import NET, Host
from tests.support.cluster.lab import CLIENT, Lab, opened_lab
from tests.support.processes import until

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.timeout(400)]

MACS = {"studio": 2, "macbook": 3}
"""Host of each node."""
SETTINGS = ("engine.scripted.step_ms=20", "engine.scripted.max_batch_size=16")
LENGTHS = (3, 20, 60, 150, 300)
"""Tokens of the answers."""
CLIENTS = 12
REPORT_SECONDS = 1.0
"""Age of the last report of a node below which its link works."""
SECONDS = 90.0
"""Seconds in which faults begin."""


@pytest.fixture
def lab() -> Iterator[Lab]:
    with opened_lab() as made:
        yield made


class Faults:
    """Faults of one Mac at a time. Each ends with both nodes at work, hence the other Mac can take every answer."""

    def __init__(self, lab: Lab, draw: random.Random) -> None:
        self._lab = lab
        self._draw = draw
        self._names = list(MACS)

    def inject_one(self) -> str:
        """Inject one fault, undo it, wait until both nodes serve, and return its name."""
        name = self._draw.choice(self._names)
        host = self._lab.hosts[MACS[name]]
        fault = self._draw.choice(
            (
                self._cut_cable,
                self._change_address,
                self._suspend_agent,
                self._suspend_engine,
                self._lose_power,
                self._restart,
            )
        )
        fault(name, host)
        until(lambda: all(map(self._reports, MACS)), 60, "both nodes report and serve")
        return fault.__name__

    def _reports(self, name: str) -> bool:
        return self._lab.pool.serves(name) and self._lab.pool.node(name)["heard_seconds"] < REPORT_SECONDS

    def _wait(self, longest: float, shortest: float = 0.3) -> None:
        time.sleep(self._draw.uniform(shortest, longest))

    def _cut_cable(self, _: str, host: Host) -> None:
        self._lab.hosts.cut(host)
        self._wait(14.0)
        self._lab.hosts.restore(host)

    def _change_address(self, _: str, host: Host) -> None:
        self._lab.hosts.address(host, f"{NET}.{self._draw.randrange(20, 200)}")
        self._wait(4.0, 2 * REPORT_SECONDS)  # its last report is older then

    def _suspend_agent(self, name: str, host: Host) -> None:
        self._suspend(name, host, is_engine=False)

    def _suspend_engine(self, name: str, host: Host) -> None:
        self._suspend(name, host, is_engine=True)

    def _suspend(self, name: str, host: Host, *, is_engine: bool) -> None:
        stopped = [
            pid for pid in host.pids() if is_engine == (b"engine.process" in Path(f"/proc/{pid}/cmdline").read_bytes())
        ]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        self._wait(13.0)
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        self._lab.pool.nodes[name].popen.send_signal(signal.SIGCONT)  # nsenter stops with its child

    def _lose_power(self, name: str, host: Host) -> None:
        self._lab.hosts.power_off(host)
        self._wait(8.0)
        self._lab.hosts.boot(host)
        self._lab.join(name, host.number, *SETTINGS, token=False, wait=False)

    def _restart(self, name: str, host: Host) -> None:
        assert self._lab.pool.nodes[name].stop(60) == 0
        self._wait(2.0)
        self._lab.join(name, host.number, *SETTINGS, token=False, wait=False)


@pytest.mark.nightly
def test_random_faults_of_one_mac_lose_and_change_no_answer(lab: Lab) -> None:
    """CI has these tests, each with one fault:

    - `tests/e2e/test_resume.py`
    - `tests/e2e/test_hosts.py::test_nodes_found_by_bonjour_serve_and_one_loses_power`
    """
    lab.up()
    lab.join_all(*SETTINGS)
    reference = lab.on_client(partial(_ask, lab, max(LENGTHS), stream=False)).result()
    texts = {tokens: "".join(word + " " for word in reference.split(" ")[:tokens]) for tokens in LENGTHS}
    ended = threading.Event()
    clients = [
        lab.on_client(partial(_chat_until, lab, ended, random.Random(SEED + number), texts))
        for number in range(CLIENTS)
    ]
    faults, kinds, deadline = Faults(lab, random.Random(SEED)), Counter[str](), time.monotonic() + SECONDS
    try:
        while time.monotonic() < deadline:
            kinds[faults.inject_one()] += 1
    finally:
        ended.set()
    counts = [client.result() for client in clients]
    assert len(kinds) >= 3, f"{kinds} with seed {SEED}"
    assert all(counts), f"each client had answers: {counts}"
    until(lambda: not _read_status(lab)["in_flight"], what="no request is left")


def _read_status(lab: Lab) -> dict[str, int]:
    return lab.pool.cli("status")


def _chat_until(lab: Lab, ended: threading.Event, draw: random.Random, texts: dict[int, str]) -> int:
    """Chat until `ended` is set, compare each answer with its text, and return their number."""
    count = 0
    while not ended.is_set():
        tokens, stream = draw.choice(LENGTHS), draw.random() < 0.7
        text = _ask(lab, tokens, stream=stream)
        assert text == texts[tokens], f"{tokens} tokens, stream {stream}: {text!r}"
        count += 1
    return count


def _ask(lab: Lab, tokens: int, *, stream: bool) -> str:
    """Return the text of a complete answer. Raise `AssertionError` if it is an error or has no end."""
    body = {
        "model": "scripted-1",
        "stream": stream,
        "max_tokens": tokens,
        "messages": [{"role": "user", "content": "hi"}],
    }
    headers, url = {"Authorization": f"Bearer {lab.pool.key}"}, f"{lab.pool.base}/v1/chat/completions"
    with httpx.Client(**CLIENT) as client, client.stream("POST", url, json=body, headers=headers) as answer:
        lines = list(answer.iter_lines())
    assert answer.status_code == 200, lines
    if not stream:
        return json.loads("".join(lines))["choices"][0]["message"]["content"]
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events[-1] == "[DONE]", events[-2:]
    chunks = [json.loads(event) for event in events[:-1]]
    assert not [chunk for chunk in chunks if "error" in chunk], chunks[-1]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
