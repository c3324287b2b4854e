"""`cluster doctor` on a coordinator, on a node, and on the node when its coordinator is gone."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import CLI, environment, pool

pytestmark = pytest.mark.slow


def doctor(state: Path, code: int, *arguments: str, **extra: str) -> dict[str, dict[str, Any]]:
    """Run the doctor; return its findings by id."""
    command = [*CLI, "doctor", "--state", str(state), "--json", "--seconds", "50", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(**extra), timeout=90)
    assert done.returncode == code, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["exit"] == code
    return {one["id"]: one for one in told["checks"]}


def test_every_state_that_a_machine_of_the_pool_can_be_in(tmp_path: Path):
    with pool(tmp_path) as made:
        made.up()
        node = made.join("one")
        at_home = doctor(made.state, 0)
        assert at_home["coordinator"]["result"] == "ok"
        assert at_home["protocol"]["numbers"]["nodes"] == 1
        assert at_home["clock"]["result"] == "ok"
        assert set(at_home["certificates"]["numbers"]) == {"authority", "coordinator"}
        assert at_home["identity"]["result"] == "not here"
        away = doctor(tmp_path / "one", 0)
        assert away["coordinator"]["result"] == "ok", away["coordinator"]
        assert away["identity"]["result"] == "ok"
        assert away["clock"]["result"] == "ok"
        assert "node" in away["certificates"]["numbers"]
        assert node.popen.poll() is None, "a look at the link does not end it"
        assert "the running processes have engine.kind, node.machine, node.name from flags" in away["settings"]["text"]
        (tmp_path / "one" / "config.toml").write_text("[memory]\nmargin = '3GiB'\n")
        shown = made.run("config", "show", "--running", "--changed", "--state", str(tmp_path / "one")).stdout
        assert "node.machine" in shown
        assert "3GiB" not in shown, "what runs does not know of it yet"
        changed = doctor(tmp_path / "one", 0)["settings"]
        assert changed["result"] == "warn"
        assert "config.toml has memory.margin = 3GiB, the running process uses auto" in changed["text"]
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path / "one" / "node" / "identity", copy / "node" / "identity")
        for name in ("running.json", "lock"):
            shutil.copy(tmp_path / "one" / "node" / name, copy / "node")
        copied = doctor(copy, 6, MACPOOL_NODE__MACHINE="two")
        assert "belongs to another machine" in copied["identity"]["text"]
        assert made.coordinator is not None
        made.coordinator.kill()
        alone = doctor(tmp_path / "one", 6)
        assert alone["coordinator"]["result"] == "fail"
        assert "cluster join" in alone["coordinator"]["fix"]
        dead = doctor(made.state, 6)
        assert "cannot be reached" in dead["coordinator"]["text"]
