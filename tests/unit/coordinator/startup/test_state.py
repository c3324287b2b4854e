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
import asyncio, json, os, sys
from contextlib import AsyncExitStack
from pathlib import Path
import structlog
from coordinator.startup.state import load_credentials, open_state
from coordinator.state.settings import ClusterSettings, HttpSettings
from node.agent.identity import new_request
from wire.certificate import read_certificate
from wire.identity import NodeId
folder, key = Path(sys.argv[1]), b""
async def main():
    global key
    async with AsyncExitStack() as stack:
        state = open_state(folder, ClusterSettings(name="lab", certificate_days=2), stack, lambda: None)
        made = read_certificate(state.authority.sign_request(new_request("a").csr, NodeId("a"), "a"))
        access = load_credentials(state, HttpSettings(anonymous=True), "127.0.0.1")
        structlog.get_logger("coordinator.test").info("hello")
        await asyncio.sleep(0)
        events = [piece async for piece in state.events.stream_events(None, 1, follow=False)]
        facts = {
            "epoch": state.epoch,
            "first": state.needs_first_key,
            "name": state.store.meta.name,
            "days": (made.expires - made.issued) / 86400,
            "anonymous": access.ring.check(b"any").id,
            "key": access.ring.check(key).name,
            "events": ["hello" in piece.decode() for piece in events],
        }
        key = key or access.admin.create_key("laptop", ["infer"], None)["key"].encode()
        await state.store.flush()
    return {**facts, "databases": sorted(name for name in os.listdir(folder) if ".db" in name)}
for removed in sys.argv[2:]:
    if removed:
        os.rename(folder / removed, folder.parent / removed)
    try:
        print(json.dumps(asyncio.run(main())))
    except Exception as error:
        print(json.dumps({"error": type(error).__name__, "message": str(error)}))
    if removed:
        os.rename(folder.parent / removed, folder / removed)
"""
"""Opens a state folder once for each further argument, which names a file that is missing meanwhile."""


def open_folder(folder: Path, *removed: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-P", "-c", OPEN, str(folder), *removed]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=60)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_each_start_has_its_epoch_and_the_settings_and_keys_of_the_cluster(tmp_path: Path):
    first, second = open_folder(tmp_path / "state", "", "")
    assert first.pop("days") == pytest.approx(2.0, abs=0.1)
    assert first == {
        "epoch": 1,
        "first": True,
        "name": "lab",
        "anonymous": "anonymous",
        "key": "anonymous",
        "events": [True],
        "databases": ["cluster.db"],
    }
    assert (second["epoch"], second["first"], second["key"]) == (2, False, "laptop")
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "state", tmp_path / "state" / "logs")] == [0o700] * 2


def test_a_cluster_without_its_authority_or_the_secret_of_its_keys_does_not_start(tmp_path: Path):
    first, authority, pepper, again = open_folder(tmp_path / "state", "", "authority", "pepper", "")
    assert [authority["error"], pepper["error"]] == ["AuthorityError", "StoreError"]
    assert "none of 1 API keys is valid" in pepper["message"]
    assert (first["epoch"], again["key"]) == (1, "laptop"), "nothing is created in their place"


def test_a_superseded_coordinator_does_not_start(tmp_path: Path):
    open_folder(tmp_path, "")
    authority = ClusterCa(tmp_path / "authority", time.time)
    record_superseded(tmp_path, SupersededMark(3, authority.seal_generation(3), "n1"))
    (done,) = open_folder(tmp_path, "")
    assert (done["error"], "this cluster has moved" in done["message"]) == ("SupersededError", True)
