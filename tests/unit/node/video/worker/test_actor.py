"""The actor ends with the process that started it. Under a real Ray it runs in tests/e2e/video/test_ray.py."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support.processes import ROOT, environment

CHILD = """
import os, sys, types
sys.modules["ray"] = types.ModuleType("ray")
from node.video.worker.actor import _exit_with_parent
parent = os.getppid()
print(os.getpid(), flush=True)
_exit_with_parent(parent)
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


@pytest.mark.timeout(60)
def test_it_exits_after_its_parent():
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD], cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
        late = threading.Timer(20, os.kill, (child, signal.SIGKILL))
        late.start()
        parent.stdout.read()  # its end is the end of the child, which holds the pipe
        assert late.is_alive(), "it had to be killed"
        late.cancel()


LEFT_ALONE = """
import sys, threading, types
sys.modules["ray"] = types.ModuleType("ray")
from node.video.worker import actor
actor.LINGER_SECONDS = 0.0
actor.WorkerHost(sys.argv[1], "l-1", 1)
threading.Event().wait(30)
sys.exit("still here")
"""


def test_it_exits_after_its_worker(tmp_path: Path):
    command = [sys.executable, "-c", LEFT_ALONE, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
