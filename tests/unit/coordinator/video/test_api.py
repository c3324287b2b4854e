"""The video routes in front of a real controller and node: confirmed jobs, repeated requests, headers and counts."""

import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from coordinator.video.store import FILE, VideoStore
from tests.support.cluster.cluster_port import Port, a_report, opened
from tests.unit.coordinator.video.state.test_job_table import a_job
from tests.unit.coordinator.video.state.test_lease_placement import WAN, a_node

BODY = {"model": WAN.name, "prompt": "a cat"}


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[Port]:
    """Yield a coordinator with a node for videos and one older job."""
    (tmp_path / "state").mkdir(mode=0o700)
    with closing(VideoStore(tmp_path / "state")) as store:
        store.put_job(a_job(9))
    async with opened(tmp_path) as made:
        studio, view = made.member("studio"), a_node("studio")
        made.application.nodes.administration.set_video_allowed(studio.node, on=True)
        await made.link(studio, a_report(video=view.video, memory=view.memory))
        await made.until(lambda: made.state(studio) == "ready")
        yield made


@pytest.fixture
async def client(port: Port) -> AsyncIterator[httpx.AsyncClient]:
    async with port.client("infer") as made:
        yield made


def get_error(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


async def test_clients_are_asked_to_poll_only_an_open_video(client: httpx.AsyncClient):
    made = await client.post("/v1/videos", json=BODY)
    path = f"/v1/videos/{made.json()['id']}"
    assert made.headers["openai-poll-after-ms"] == "2000"
    assert (await client.get(path)).headers["openai-poll-after-ms"] == "2000"
    cancelled = await client.post(f"{path}/cancel")
    assert (cancelled.status_code, cancelled.json()["status"]) == (200, "failed")
    assert "openai-poll-after-ms" not in cancelled.headers
    assert "openai-poll-after-ms" not in (await client.get(path)).headers


async def test_a_job_that_is_not_on_the_disk_is_not_confirmed_to_a_repeated_request_either(
    port: Port, client: httpx.AsyncClient
):
    headers, database = {"idempotency-key": "once"}, port.folder / "state" / FILE
    with closing(sqlite3.connect(database)) as other:
        other.execute("ALTER TABLE jobs RENAME TO away")
    for _ in range(2):
        assert get_error(await client.post("/v1/videos", json=BODY, headers=headers)) == (503, "storage_failed")
    with closing(sqlite3.connect(database)) as other:
        other.execute("ALTER TABLE away RENAME TO jobs")


async def test_a_repeated_request_returns_its_job_and_another_one_is_refused(client: httpx.AsyncClient):
    headers = {"idempotency-key": "once"}
    first, again = [await client.post("/v1/videos", json=BODY, headers=headers) for _ in range(2)]
    assert (first.json()["id"], first.status_code) == (again.json()["id"], 200)
    other = await client.post("/v1/videos", json=BODY | {"prompt": "a dog"}, headers=headers)
    assert get_error(other) == (409, "idempotency_key_reused")
    assert len((await client.get("/v1/videos")).json()["data"]) == 1


@pytest.mark.parametrize("key", [b"x" * 201, b"a\xa0b", b"a\tb"])
async def test_an_idempotency_key_is_short_and_printable(client: httpx.AsyncClient, key: bytes):
    headers = {b"idempotency-key": key}
    assert get_error(await client.post("/v1/videos", json=BODY, headers=headers)) == (400, "invalid_request")
    assert (await client.get("/v1/videos")).json()["data"] == []


async def test_each_answer_is_counted_once_by_its_status(port: Port, client: httpx.AsyncClient):
    counted: dict[str, Any] = {}
    for method, path, status in (
        ("GET", "/v1/videos", 200),
        ("GET", "/v1/videos", 200),
        ("GET", "/v1/videos/video_unknown", 404),
        ("PUT", "/v1/videos", 405),
        ("GET", "/v1/videos/characters", 400),
    ):
        assert (await client.request(method, path)).status_code == status
        counted[str(status)] = counted.get(str(status), 0) + 1
    answers = {str(status): count for status, count in port.application.dispatcher.counters.answers.items()}
    assert answers == counted
