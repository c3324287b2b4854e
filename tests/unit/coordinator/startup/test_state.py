"""The state folder at the start of a coordinator, opened in a process of its own, because it configures the log."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from coordinator.backup.generation_fence import SupersededMark, record_superseded
from coordinator.tls.cluster_ca import ClusterCa
from tests.support.processes import environment

OPEN = """
import asyncio, json, sys
from contextlib import AsyncExitStack
from pathlib import Path
from coordinator.startup.state import load_credentials, open_state
from coordinator.state.settings import ClusterSettings, HttpSettings
from node.agent.identity import new_request
from wire.certificate import read_certificate
from wire.identity import NodeId
async def main():
    async with AsyncExitStack() as stack:
        state = open_state(Path(sys.argv[1]), ClusterSettings(name="lab", certificate_days=2), stack, lambda: None)
        made = read_certificate(state.authority.sign_request(new_request("a").csr, NodeId("a"), "a"))
        ring = load_credentials(state, HttpSettings(anonymous=True), "127.0.0.1").ring
        print(json.dumps({
            "epoch": state.epoch,
            "first": state.needs_first_key,
            "name": state.store.meta.name,
            "days": (made.expires - made.issued) / 86400,
            "anonymous": ring.check(b"any").id,
        }))
asyncio.run(main())
"""


def open_folder(folder: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-P", "-c", OPEN, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=60)


def read_facts(folder: Path) -> dict[str, Any]:
    done = open_folder(folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_each_start_has_its_epoch_and_the_settings_of_the_cluster(tmp_path: Path):
    facts = read_facts(tmp_path / "state")
    assert facts.pop("days") == pytest.approx(2.0, abs=0.1)
    assert facts == {"epoch": 1, "first": True, "name": "lab", "anonymous": "anonymous"}
    assert read_facts(tmp_path / "state")["epoch"] == 2
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "state", tmp_path / "state" / "logs")] == [0o700] * 2


def test_a_superseded_coordinator_does_not_start(tmp_path: Path):
    read_facts(tmp_path)
    authority = ClusterCa(tmp_path / "authority", time.time)
    record_superseded(tmp_path, SupersededMark(3, authority.seal_generation(3), "n1"))
    done = open_folder(tmp_path)
    assert (done.returncode, "this cluster has moved" in done.stderr) == (1, True)
