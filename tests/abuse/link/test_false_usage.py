"""A node that lies about the usage of a request, and a state that cannot be written.

A lie uses up no key, and no change is lost.
"""

import asyncio
import contextlib
import sqlite3
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import httpx
import pytest

from coordinator.state.database import Database
from coordinator.state.store_errors import StoreError
from node.agent.enrollment import EnrollDenied, enroll
from router.admission.rate_limits import KeyLimits
from router.admission.usage import UsageTotals
from tests.support.cluster.cluster_port import Line, Port, a_report, opened
from tests.support.cluster.enrolment import HARDWARE
from tests.support.processes import CLI, Process, environment
from wire.bounds import MAX_TOKENS
from wire.frames import Admitted, Delta, Deltas, Finished, Generate

ANSWER_TOKENS = 5


@pytest.fixture
async def port(tmp_path: Path) -> AsyncGenerator[Port]:
    async with opened(tmp_path) as made:
        yield made


async def _answer(line: Line, finished: tuple[int, int, int]) -> None:
    asked = await line.until(Generate)
    prompt, completion, cached = finished
    line.send(
        Admitted(asked.request, prompt, cached),
        Deltas((Delta(asked.request, 0, (1, 2, 3), ((0, "one"),)),)),
        Finished(asked.request, ("stop",), prompt, completion, cached, reasoning_tokens=completion),
        a_report(2),
    )


async def _chat(client: httpx.AsyncClient, **changes: object) -> httpx.Response:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]} | changes
    return await client.post("/v1/chat/completions", json=body)


@pytest.mark.parametrize("bounded", [True, False])
async def test_false_usage_costs_a_key_at_most_its_request(port: Port, *, bounded: bool) -> None:
    """Before this check, 2^63 tokens locked a key out for 10^15 s, and ended the database's writer."""
    line = await port.link(who := port.member("liar"))
    await port.until(lambda: port.state(who) == "ready")
    limits = KeyLimits(tokens_per_minute=60_000)
    key = port.application.admin.create_key("limited", ["infer"], None, limits)
    asked: dict[str, object] = {"max_tokens": ANSWER_TOKENS, "n": 2} if bounded else {}
    async with port.client_of(key["key"]) as client:
        for _ in range(2):
            answering = asyncio.create_task(_answer(line, (MAX_TOKENS, MAX_TOKENS, MAX_TOKENS)))
            answer = await _chat(client, **asked)
            await answering
            assert answer.status_code == 200, answer.text
            usage = answer.json()["usage"]
            assert usage["completion_tokens"] <= (2 * ANSWER_TOKENS if bounded else 256)
            assert usage["prompt_tokens"] < 5000
            assert usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
        rows = (await client.get("/api/v1/usage")).json()["usage"]
    assert 0 < sum(row["prompt_tokens"] + row["completion_tokens"] for row in rows) < 12_000
    assert any(entry["event"] == "usage implausible" for entry in port.logs)
    await port.application.store.flush()


async def test_sent_tokens_are_charged_despite_false_usage(port: Port) -> None:
    line = await port.link(who := port.member("liar"))
    await port.until(lambda: port.state(who) == "ready")
    limits = KeyLimits(tokens_per_minute=60)
    key = port.application.admin.create_key("limited", ["infer"], None, limits)
    quotas = port.application.dispatcher.quotas
    async with port.client_of(key["key"]) as client:
        answering = asyncio.create_task(_answer(line, (0, 0, 0)))
        assert (await _chat(client)).status_code == 200
        await answering
    (rate,) = quotas.list_rates(key["id"], 0.0)
    assert (rate.unit, rate.remaining < 59) == ("tokens", True)


async def test_failed_write_answers_callers_and_keeps_revocations(tmp_path: Path) -> None:
    """Before this check the writer's thread ended, every later change hung, and a removal was in memory only."""
    store = Database(tmp_path)
    store.usage.add("key", "model", "2026-11-23", UsageTotals(prompt_tokens=2**63))
    for _ in range(2):
        async with asyncio.timeout(30):
            with pytest.raises(StoreError, match="could not be written"):
                await store.flush()
    with pytest.raises(StoreError):
        store.close()


def rename_table(port: Port, name: str, new: str) -> None:
    """Rename a table of the state: its changes fail until it has its name again."""
    with contextlib.closing(sqlite3.connect(port.folder / "state" / "cluster.db")) as other:
        other.execute(f"ALTER TABLE {name} RENAME TO {new}")


async def test_a_removal_that_is_not_on_the_disk_is_not_answered_as_done(port: Port) -> None:
    who = port.member("studio")
    await port.link(who)
    await port.application.store.flush()
    rename_table(port, "denied", "away")
    async with port.client("admin") as client:
        answer = await asyncio.wait_for(client.delete("/api/v1/nodes/studio"), 30)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "state_not_written")
    assert port.application.store.deny_list.is_denied(who.node, "")
    rename_table(port, "away", "denied")  # so that the pool closes


@pytest.mark.parametrize("failed_before", [True, False])
@pytest.mark.parametrize("has_token", [True, False])
async def test_a_member_that_cannot_be_stored_is_refused_with_the_reason(
    port: Port, tmp_path: Path, has_token: bool, failed_before: bool
) -> None:
    application = port.application

    def approve(code: str, _: float) -> None:
        application.approvals.approve(code, asyncio.get_running_loop().time())

    token = application.admin.tokens.create() if has_token else None
    await application.store.flush()
    missing = "audit" if failed_before else "members"
    rename_table(port, missing, "away")
    if failed_before:
        application.store.audit.add(0.0, "node", "joined", "studio", "")
        with pytest.raises(StoreError):
            await application.store.flush()
    with pytest.raises(EnrollDenied, match="the state could not be written") as denied:
        await asyncio.wait_for(
            enroll(
                f"127.0.0.1:{port.number}",
                token,
                name="studio",
                machine="m1",
                hardware=HARDWARE,
                folder=tmp_path / "node",
                on_code=approve,
            ),
            30,
        )
    assert denied.value.reason == "storage_failed"
    await port.until(lambda: application.nodes.server.count_unlinked() == 0)
    rename_table(port, "away", missing)  # so that the pool closes


async def test_a_revocation_is_on_the_disk_before_it_is_answered(port: Port) -> None:
    who = port.member("studio")
    made = port.application.admin.create_key("gone", ["infer"], None)
    token = port.application.admin.tokens.create()
    file = port.folder / "state" / "cluster.db"
    async with port.client("admin") as client:
        for path in (f"/api/v1/keys/{made['id']}", f"/api/v1/tokens/{token.id}", "/api/v1/nodes/studio"):
            answer = await client.delete(path)
            assert answer.status_code == 200
    assert answer.json() == {"schema": 1, "node": who.node}
    with sqlite3.connect(file) as disk:
        assert disk.execute("SELECT count(*) FROM keys WHERE revoked IS NOT NULL").fetchone() == (1,)
        assert disk.execute("SELECT revoked FROM tokens").fetchone() == (1,)
        assert disk.execute("SELECT count(*) FROM members WHERE removed IS NOT NULL").fetchone() == (1,)
        assert disk.execute("SELECT count(*) FROM denied").fetchone() == (1,)


DYING = """
import coordinator.state.store_writer as store
def execute(self, statement, values):
    if "INSERT" in statement and "keys" in statement and "boom" in values:
        raise SystemExit(3)
    return plain(self, statement, values)
plain, store.StoreWriter._execute = store.StoreWriter._execute, execute
from coordinator.cli import main
main()
"""


@pytest.mark.slow
async def test_failed_writer_ends_the_coordinator_with_an_error(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-P",
        "-c",
        DYING,
        "up",
        "--state",
        str(tmp_path / "s"),
        "--listen",
        "127.0.0.1:0",
        "--cluster-listen",
        "127.0.0.1:0",
        "-o",
        "json",
        "--set",
        "cluster.bonjour=false",
        "--no-local-node",
    ]
    process = Process(command, tmp_path / "err")
    try:
        facts = process.ready()
        assert facts["ready"]
        made = await asyncio.create_subprocess_exec(
            *CLI, "key", "create", "boom", "--state", str(tmp_path / "s"), env=environment()
        )
        assert await asyncio.wait_for(made.wait(), 30) != 0
        assert await asyncio.to_thread(process.popen.wait, 20) == 1
        assert "store writer died" in (tmp_path / "err").read_text()
    finally:
        process.close()
