"""Memory back for the owner: nodes that are paused under load, from another machine and locally."""

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest

from tests.support.processes import NO_TLS, Pool, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SLOW = ("engine.scripted.step_ms=40",)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as made:
        yield made


def chat(pool: Pool, tokens: int, stream: bool = True) -> tuple[int, str, str]:
    """Send a chat; return status, the node that began the answer, and the complete text."""
    body = {
        "model": "scripted-1",
        "stream": stream,
        "max_tokens": tokens,
        "messages": [{"role": "user", "content": "hi"}],
    }
    headers = {"Authorization": f"Bearer {pool.key}"}
    answer = httpx.post(
        f"{pool.base}/v1/chat/completions", json=body, headers=headers, timeout=60, trust_env=False, verify=NO_TLS
    )
    return answer.status_code, answer.headers.get("x-macpool-node", ""), answer.text


def words(text: str) -> int:
    return text.count('"content":"') - text.count('"content":""')


def both_at_work(pool: Pool, threads: ThreadPoolExecutor, tokens: int) -> list[Future[tuple[int, str, str]]]:
    asked = [threads.submit(chat, pool, tokens) for _ in range(6)]
    until(lambda: all(pool.node(name)["running"] for name in ("studio", "mini")), what="both at work")
    return asked


@pytest.mark.nightly
def test_a_node_is_paused_under_load_and_no_client_notices(cluster_pool: Pool, threads: ThreadPoolExecutor) -> None:
    """CI has the pause of a walk (test_walks.py), and these tests:

    - `tests/unit/router/placement/test_recovery.py::test_a_node_that_drains_is_emptied_and_no_client_notices`
    - `tests/unit/coordinator/cluster/test_members.py::test_a_pause_is_sent_to_its_node_and_answered_by_its_report`
    - `tests/unit/node/sharing/test_controller.py::test_a_pause_outlives_the_node_and_ends_by_itself`
    - `tests/unit/node/sharing/test_controller.py::test_what_a_person_writes_or_removes_here_is_seen`
    - `tests/unit/node/test_paused_node.py`
    """
    pool = cluster_pool
    pool.up()
    for name in ("studio", "mini"):
        pool.join(name, *SLOW)
    asked = both_at_work(pool, threads, 120)
    engine = pool.node("studio")["engine"]
    told = pool.cli("pause", "studio", "1h")
    assert told["sharing"]["paused"]
    assert until(lambda: pool.node("studio")["state"] == "paused")
    assert [(one.result()[0], words(one.result()[2])) for one in asked] == [(200, 120)] * 6
    assert {chat(pool, 2)[1] for _ in range(4)} == {"mini"}
    until(lambda: pool.node("studio")["engine"]["recycles"] == engine["recycles"] + 1, what="the engine replaced")
    assert pool.node("studio")["engine"]["restarts"] == engine["restarts"]
    listed = pool.run("nodes", "--state", str(pool.state)).stdout
    assert "paused until" in listed
    assert "an administrator of the pool" in listed

    assert pool.nodes["studio"].stop() == 0
    pool.join("studio", *SLOW, wait=False)
    until(lambda: pool.node("studio")["state"] == "paused", what="still paused after its restart")
    assert pool.coordinator is not None
    listen = pool.facts["cluster_url"].removeprefix("macpool://")
    pool.coordinator.kill()
    alone = pool.run("resume", "--state", str(pool.folder / "studio"))
    assert "accepts requests again" in alone.stdout
    paused = pool.run("pause", "2h", "--state", str(pool.folder / "mini"))
    assert "accepts no new requests" in paused.stdout, paused.stderr
    pool.up("router.queue_timeout_seconds=2", cluster_listen=listen)
    until(lambda: pool.node("mini")["state"] == "paused", what="mini paused while nobody coordinated")
    until(lambda: pool.serves("studio"), what="studio serves again")
    assert {chat(pool, 2)[1] for _ in range(4)} == {"studio"}
    answer = pool.cli("pause", "studio")
    assert answer["sharing"]["until"] is None
    status, _, text = chat(pool, 2, stream=False)
    assert status == 503
    assert "paused by an administrator of the pool" in json.loads(text)["error"]["message"]
    assert pool.cli("resume", "mini")["sharing"]["paused"] is False
    until(lambda: pool.serves("mini"))
    assert chat(pool, 2)[1] == "mini"
    assert pool.run("pause", "nobody", "2h", "--state", str(pool.state)).returncode == 5
    assert pool.run("pause", "2h", "--state", str(pool.state)).returncode == 5, "no node in the coordinator's folder"


@pytest.mark.nightly
def test_what_fits_nowhere_else_has_its_grace_and_hours_keep_a_node_out(
    cluster_pool: Pool, threads: ThreadPoolExecutor
) -> None:
    """CI has these tests:

    - `tests/unit/node/sharing/test_controller.py::test_requests_and_videos_have_each_their_own_grace`
    - `tests/unit/node/sharing/test_policy.py`
    """
    pool = cluster_pool
    pool.up("router.queue_timeout_seconds=2")
    pool.join("studio", *SLOW, "sharing.grace_seconds=1")
    short = threads.submit(chat, pool, 30)
    long = threads.submit(chat, pool, 3000)
    until(lambda: pool.node("studio")["running"] == 2, what="at work")
    pool.cli("pause", "studio", "1h")
    assert words(short.result()[2]) == 30
    assert "node_stopping" in long.result()[2] or "node_lost" in long.result()[2]
    assert "stopped sharing" in long.result()[2]
    until(lambda: pool.node("studio")["engine"]["recycles"] == 1, what="the memory back")
    pool.cli("resume", "studio")
    until(lambda: pool.serves("studio"))
    assert chat(pool, 3)[0] == 200

    assert pool.nodes["studio"].stop() == 0
    pool.join("studio", "sharing.when=hours", "sharing.hours=00:00-00:01", wait=False)
    until(lambda: pool.node("studio")["state"] in ("paused", "ready"))
    if pool.node("studio")["state"] == "paused":
        assert "the Mac shares only within 00:00-00:01" in pool.node("studio")["sharing"]["why"]
        assert pool.cli("resume", "studio")["sharing"]["paused"], "the rule still holds"
