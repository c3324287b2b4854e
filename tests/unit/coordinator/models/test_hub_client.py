"""Queries to the hub whose child process fails."""

import asyncio
import json
import os
import sys
from pathlib import Path

import psutil
import pytest

from coordinator.models import hub_client
from coordinator.models.hub_client import MAX_QUERIES, HubClient, TokenFileError
from coordinator.models.settings import HubSettings
from wire.frames import ModelOrderCode
from wire.models.hub_query import QUERY_TIMEOUT_SECONDS, HubRefusal


async def test_a_child_that_cannot_be_started_is_a_refusal(tmp_path: Path) -> None:
    answer = await HubClient(HubSettings(), (str(tmp_path / "missing"),)).query("pub/model", "")
    assert isinstance(answer, HubRefusal)
    assert answer.code == ModelOrderCode.FAILED
    assert "cannot be started (No such file or directory)" in answer.message


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import sys; print('one', file=sys.stderr); sys.exit('two')", "failed: two; install Macpool"),
        ("import sys; sys.exit(3)", "failed: exit code 3; install Macpool"),
        ("print('{}')", "failed: exit code 0; install Macpool"),
    ],
)
async def test_the_last_line_of_a_child_that_fails_is_the_reason(program: str, reason: str) -> None:
    answer = await HubClient(HubSettings(), (sys.executable, "-c", program)).query("pub/model", "")
    assert isinstance(answer, HubRefusal)
    assert (answer.code, reason in answer.message) == (ModelOrderCode.FAILED, True), answer.message


async def test_a_token_file_that_cannot_be_used_refuses_the_query_before_the_child_starts(tmp_path: Path) -> None:
    token, started = tmp_path / "token", tmp_path / "started"
    token.write_text("two words")
    token.chmod(0o600)
    program = (sys.executable, "-c", f"open({str(started)!r}, 'w')")
    answer = await HubClient(HubSettings(token_file=str(token)), program).query("pub/model", "")
    assert answer == HubRefusal(
        code=ModelOrderCode.INVALID, message=f"hub.token_file {token} does not contain a token in one line"
    )
    assert not started.exists()


async def test_a_child_that_does_not_answer_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_client, "CHILD_TIMEOUT_SECONDS", 0.5)
    children = set(psutil.Process(os.getpid()).children())
    program = (sys.executable, "-c", "import signal; signal.pause()")
    query = asyncio.create_task(HubClient(HubSettings(), program).query("pub/model", ""))
    answer = await asyncio.wait_for(query, 30)
    assert isinstance(answer, HubRefusal)
    assert answer.code == ModelOrderCode.SOURCE_LOST
    assert set(psutil.Process(os.getpid()).children()) <= children


async def test_a_query_has_the_revision_the_token_and_the_hub_without_a_last_slash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    token = tmp_path / "token"
    token.write_text("  hf_secret\n")
    token.chmod(0o600)
    client = HubClient(
        HubSettings(endpoint="http://hub.lan/", token_file="~/token"),
        (sys.executable, "-c", "import sys; sys.exit(sys.stdin.read())"),
    )
    answer = await client.query("pub/model", "v2")
    assert isinstance(answer, HubRefusal)
    assert json.loads(answer.message.removeprefix("the query of the hub failed: ").partition(";")[0]) == {
        "endpoint": "http://hub.lan",
        "repo": "pub/model",
        "token": "hf_secret",
        "revision": "v2",
        "timeout_seconds": QUERY_TIMEOUT_SECONDS,
    }


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_token_that_others_can_read_is_not_used(tmp_path: Path, mode: int) -> None:
    token = tmp_path / "token"
    token.write_text("hf_secret")
    token.chmod(mode)
    with pytest.raises(TokenFileError, match=r"is readable by other users: run chmod 600 /"):
        HubClient(HubSettings(token_file=str(token))).read_token()


async def test_two_queries_run_at_once() -> None:
    children = psutil.Process(os.getpid()).children
    before = set(children())
    client = HubClient(HubSettings(), (sys.executable, "-c", "import signal; signal.pause()"))
    queries = [asyncio.create_task(client.query("pub/model", "")) for _ in range(MAX_QUERIES + 1)]
    async with asyncio.timeout(30):
        while len(set(children()) - before) < MAX_QUERIES:  # noqa: ASYNC110  processes have no event
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    assert len(set(children()) - before) == MAX_QUERIES
    for query in queries:
        query.cancel()
    await asyncio.wait(queries)
