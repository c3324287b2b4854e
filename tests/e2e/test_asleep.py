"""A sleeping Mac is `asleep`, not lost: no alert fires, no request is placed there, and the node is back after
waking."""

import signal
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT, Process, pool, until

pytestmark = pytest.mark.slow


def test_a_node_announces_its_sleep_and_returns(tmp_path: Path):
    with pool(tmp_path) as made:
        made.up()
        made.join("book")
        made.nodes["book"].stop()
        program = [sys.executable, "-P", str(ROOT / "tests" / "support" / "cluster" / "sleepy_node.py")]
        settings = ["--set", "node.machine=book", "--set", "engine.kind=scripted", "--output", "json"]
        node = Process([*program, "--state", str(tmp_path / "book"), *settings], tmp_path / "book.err")
        try:
            node.ready()
            until(lambda: made.serves("book"), what="book ready")
            before = made.node("book")["id"]
            node.signal(signal.SIGHUP)
            until(lambda: made.node("book")["state"] == "asleep", what="book asleep")
            assert node.popen.poll() is None
            assert "asleep" in made.run("nodes", "--state", str(made.state)).stdout
            refused = made.run("place", "scripted-1", "--state", str(made.state))
            assert refused.returncode != 0
            assert "book" not in str(made.get("/api/v1/conditions")["conditions"])
            node.signal(signal.SIGWINCH)
            until(lambda: made.serves("book"), what="book ready again")
            assert made.node("book")["id"] == before
            assert made.run("place", "scripted-1", "--state", str(made.state)).returncode == 0
        finally:
            node.close()
