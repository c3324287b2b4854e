"""The broker's process; it drives a true Ray in tests/e2e/test_videos.py."""

import socket
import subprocess
import sys

import pytest

from coordinator.video.spoken import Connect, said
from tests.support.processes import ROOT, environment

RAY = """
import sys, threading, types
ray = sys.modules["ray"] = types.ModuleType("ray")
ray.init = lambda **how: (print("connecting", flush=True), threading.Event().wait())
strategies = sys.modules["ray.util.scheduling_strategies"] = types.ModuleType("s")
sys.modules["ray.util"] = types.ModuleType("u")
strategies.NodeAffinitySchedulingStrategy = object
from coordinator.video import broker
broker.main()
"""


@pytest.mark.timeout(60)
def test_a_broker_that_cannot_connect_yet_ends_with_its_coordinator():
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", RAY, str(theirs.fileno())], cwd=ROOT, env=environment(), stdout=subprocess.PIPE,
            pass_fds=(theirs.fileno(),),
        )  # fmt: skip
    with ours, process:
        try:
            ours.sendall(said(Connect("127.0.0.1:1", "127.0.0.1")))
            assert process.stdout is not None
            assert process.stdout.readline() == b"connecting\n"
            ours.close()
            assert process.wait(20) == 3
        finally:
            process.kill()
