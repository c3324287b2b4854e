"""Program of the coordinator: its start, the output at its start, and its stop."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from coordinator.run import announce_ready
from coordinator.startup.endpoint import MAX_OPEN_FILES
from coordinator.state.database import Database
from tests.support.processes import environment

SERVE = """
import asyncio, json, os, resource, signal, sys
from contextlib import suppress
from functools import partial
from pathlib import Path
import msgspec
from coordinator import run
from coordinator.backup.generation_fence import SupersededError, SupersededMark
from coordinator.startup.options import RunOptions
from coordinator.state.settings import CoordinatorSettings
from router.dispatch.dispatcher import Dispatcher

told, parts = {"facts": [], "drained": [], "announced": [], "superseded": False}, {}
drain, open_state, start_cluster = Dispatcher.drain, run.open_state, run.start_cluster

async def record_drain(dispatcher, seconds):
    told["drained"].append(seconds)
    await drain(dispatcher, seconds)

def record_state(folder, cluster, stack, on_death):
    parts["die"] = on_death
    return open_state(folder, cluster, stack, on_death)

async def record_cluster(options, state, access, on_superseded, stack):
    parts["supersede"] = lambda: on_superseded(SupersededMark(9, state.authority.seal_generation(9), "studio"))
    return await start_cluster(options, state, access, on_superseded, stack)

Dispatcher.drain, run.open_state, run.start_cluster = record_drain, record_state, record_cluster
run.announce_coordinator = lambda *_: told["announced"].append(len(told["facts"]))
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, most))

async def serve(stop, **cluster):
    settings = {"http": {"tls": "off", "drain_seconds": 3.0}, "cluster": {"name": "lab", **cluster}}
    settings = msgspec.convert(settings, CoordinatorSettings)
    address = ("127.0.0.1", 0)
    def ready(facts):
        told["facts"].append(facts)
        asyncio.get_running_loop().call_soon(stop)
    await asyncio.wait_for(run.serve(RunOptions(Path(sys.argv[1]), address, address, False, (), settings), ready), 30)

for number in (signal.SIGINT, signal.SIGTERM):
    asyncio.run(serve(partial(os.kill, os.getpid(), number), bonjour=number == signal.SIGTERM))
asyncio.run(serve(lambda: parts["die"](), bonjour=False))
try:
    asyncio.run(serve(lambda: parts["supersede"](), bonjour=False))
except SupersededError:
    told["superseded"] = True
told["files"], told["switch"] = resource.getrlimit(resource.RLIMIT_NOFILE)[0], sys.getswitchinterval()
told["most"] = most
print(json.dumps(told))
"""
"""Serves four times with one state folder. A run ends with SIGINT, SIGTERM, a dead writer, or a newer coordinator."""


def test_the_coordinator_starts_and_stops_with_all_of_its_parts(tmp_path: Path):
    command = [sys.executable, "-P", "-c", SERVE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    first, *others = told["facts"]
    assert [facts["local_node_ready"] for facts in told["facts"]] == [None] * 4
    assert first.pop("api_key").startswith("mp_")
    assert all("api_key" not in facts for facts in others), "only the first start makes a key"
    assert (told["drained"], told["announced"], told["superseded"]) == ([3.0] * 4, [1], True)
    assert told["files"] == min(MAX_OPEN_FILES, told["most"]) if told["most"] > 0 else MAX_OPEN_FILES
    assert told["switch"] == pytest.approx(0.001)
    store = Database(tmp_path)
    (key,) = store.keys.values()
    tokens = len(store.tokens)
    store.close()
    assert (key.name, key.scopes, tokens, store.meta.epoch) == ("first", ("infer",), 4, 4)


def test_coordinator_serves_without_a_reader_of_its_output() -> None:
    printed = list[dict[str, Any]]()

    def fail(facts: dict[str, Any]) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    with capture_logs() as logs:
        announce_ready(printed.append, {"schema": 1})
        announce_ready(fail, {})
    assert printed == [{"schema": 1}]
    assert [(line["event"], line["error"]) for line in logs] == [("ready line not printed", "[Errno 32] Broken pipe")]
