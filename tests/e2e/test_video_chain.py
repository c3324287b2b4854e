"""Every process of the chain that makes a video is killed, in one phase of a job after the other.

The table that is printed is the one of docs/video.md; `python -m tests.bench video` fills all of it.
"""

import os
import signal
import socket
import ssl
from contextlib import suppress

import psutil
import pytest

from coordinator.video.head import PORTS as HEAD_PORTS
from tests.support.chain import PHASES, Chain, chain, expected, table
from tests.support.processes import Pool, Process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PORTS = 23000 + 1000 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
BACK = 2.0 + 3.0
"""Seconds until the memory is back, with what a busy machine may add; at rest it is below 2 s."""
CELLS = {
    "node": (
        ("worker", "loading"), ("worker", "saving"), ("actor", "loading"), ("actor", "denoising"), ("actor", "saving"),
        ("raylet", "denoising"), ("engine", "acquiring"), ("agent", "saving"), ("launcher", "loading"),
        ("engine", "denoising"), ("agent", "pulling"), ("launcher", "acquiring"), ("agent", "queued"),
    ),
    "coordinator": (
        ("broker", "denoising"), ("coordinator", "denoising"), ("gcs_server", "denoising"), ("coordinator", "pulling"),
        ("head's launcher", "loading"), ("coordinator", "acquiring"), ("broker", "acquiring"),
        ("head's raylet", "saving"),
    ),
}  # fmt: skip
"""Those that cost no minutes. Whoever waits twice as long each time before it starts a process again (broker and head,
whose end is the broker's, too; Ray and engine on a node) is itself killed in between."""


@pytest.mark.parametrize("side", CELLS)
def test_whoever_is_killed_and_whenever_the_memory_is_back(
    cluster_pool: Pool, side: str, capsys: pytest.CaptureFixture[str]
):
    with chain(cluster_pool, PORTS) as one:
        nobody_else_is_let_in(one)
        outcomes = [one.kill(victim, phase) for victim, phase in CELLS[side]]
        if side == "coordinator":  # as an upgrade does it: what is lent stays lent, and the job is done
            outcomes.append(one.kill("coordinator", "loading", signal.SIGTERM))
        assert one.chats()
    with capsys.disabled():
        print("\n" + table(outcomes))
    assert {phase for _, phase in CELLS[side]} <= set(PHASES)
    for outcome in outcomes:
        assert outcome.end == expected(outcome.victim, outcome.phase), outcome
        assert outcome.back is None or outcome.back < BACK, outcome


def nobody_else_is_let_in(one: Chain) -> None:
    """Ray listens where the manual says, and says no word to whoever has no certificate of its authority."""
    assert one.pool.coordinator is not None
    head = listening(one.pool.coordinator)
    assert head
    assert max(head) - min(head) < HEAD_PORTS
    assert all(PORTS <= port < PORTS + 60 for port in listening(one.pool.nodes["a"]))
    for port in (min(head), *(port for port in head if port <= min(head) + 2)):
        assert not speaks(port, None)
        blind = ssl.create_default_context()
        blind.check_hostname, blind.verify_mode = False, ssl.CERT_NONE
        assert not speaks(port, blind)


def listening(process: Process) -> set[int]:
    """Give the TCP ports on which the processes below one listen."""
    found = set[int]()
    for child in process.children():
        with suppress(psutil.Error):
            found |= {one.laddr.port for one in child.net_connections("tcp") if one.status == psutil.CONN_LISTEN}
    return found


def speaks(port: int, tls: ssl.SSLContext | None) -> bool:
    """Whether gRPC answers a stranger's first words: a frame of settings (HTTP/2, type 4)."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as plain:
        line = tls.wrap_socket(plain) if tls else plain
        line.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5))
        return line.recv(9)[3:4] == b"\x04"
    return False
