"""The launcher of Ray with a stand-in for Ray's command line."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from node.video.ray.ray_process import CHILD
from tests.support.processes import ROOT, environment

RAY = "import sys, time; print(sys.argv[1:], flush=True); time.sleep(600)"
"""A module in the place of `ray.scripts.scripts` that prints its arguments and runs."""


def test_ray_gets_the_arguments_and_sigterm_at_the_end_of_stdin(tmp_path: Path):
    module = tmp_path / "ray" / "scripts" / "scripts.py"
    module.parent.mkdir(parents=True)
    module.write_text(RAY)
    (tmp_path / "ray" / "__init__.py").touch()
    (tmp_path / "ray" / "scripts" / "__init__.py").touch()
    variables = environment(PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, *CHILD, "--port=1"], stdin=pipe, stdout=pipe, env=variables) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"['start', '--block', '--port=1']\n"
        assert process.poll() is None
        process.stdin.close()
        assert process.wait(10) == -signal.SIGTERM
