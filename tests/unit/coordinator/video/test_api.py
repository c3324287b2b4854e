"""The video routes in front of a real controller and node: confirmed jobs, repeated requests, headers and counts."""

import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from coordinator.state.access_admin import LOCAL_KEY_NAME
from coordinator.video.api import MAX_JSON_BYTES, MAX_LISTED
from coordinator.video.state.jobs import JobFault, JobState, StoredFile
from coordinator.video.store import FILE, VideoStore
from router.admission.api_keys import new_key
from router.admission.rate_limits import KeyLimits
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


async def test_an_idempotency_key_of_two_hundred_characters_is_accepted(client: httpx.AsyncClient):
    headers = {"idempotency-key": "x" * 200}
    first, again = [await client.post("/v1/videos", json=BODY, headers=headers) for _ in range(2)]
    assert (first.status_code, again.json()["id"]) == (200, first.json()["id"])


async def test_a_list_is_read_in_pages_in_either_order(client: httpx.AsyncClient):
    made = [(await client.post("/v1/videos", json=BODY)).json()["id"] for _ in range(3)]

    async def read(**query: str | int) -> tuple[list[str], bool]:
        page = (await client.get("/v1/videos", params=query)).json()
        ids = [row["id"] for row in page["data"]]
        assert (page["first_id"], page["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))
        return ids, page["has_more"]

    assert await read() == await read(limit=3) == await read(limit=MAX_LISTED) == (made[::-1], False)
    assert await read(limit=2) == ([made[2], made[1]], True)
    assert await read(limit=2, after=made[1]) == ([made[0]], False)
    assert await read(limit=1, order="asc") == ([made[0]], True)
    assert await read(limit=1, order="asc", after=made[0]) == ([made[1]], True)
    assert await read(after=made[0]) == ([], False)
    for query in ({"limit": 0}, {"limit": MAX_LISTED + 1}, {"order": "up"}, {"after": "video_unknown"}):
        assert get_error(await client.get("/v1/videos", params=query)) == (400, "invalid_request")


async def test_a_video_of_another_key_is_neither_found_nor_counted(port: Port, client: httpx.AsyncClient):
    path = f"/v1/videos/{(await client.post('/v1/videos', json=BODY)).json()['id']}"
    key = port.application.admin.create_key("one", ["infer"], None, KeyLimits(concurrency=1))["key"]
    async with port.client_of(key) as other:
        for method, name in (("GET", path), ("GET", f"{path}/content"), ("POST", f"{path}/cancel"), ("DELETE", path)):
            assert get_error(await other.request(method, name)) == (404, "video_not_found")
        assert (await other.get("/v1/videos")).json()["data"] == []
        own = await other.post("/v1/videos", json=BODY)
        assert own.status_code == 200, "the limit of a key counts its own videos only"
        assert get_error(await other.post("/v1/videos", json=BODY)) == (429, "rate_limited")
        await other.delete(f"/v1/videos/{own.json()['id']}")
        assert (await other.post("/v1/videos", json=BODY)).status_code == 200
    assert (await client.get(path)).json()["status"] != "failed"


async def test_a_body_of_json_is_short_even_where_the_router_accepts_more(client: httpx.AsyncClient):
    headers = {"content-type": "application/json"}
    sent = await client.post("/v1/videos", content=b" " * (MAX_JSON_BYTES + 1), headers=headers)
    assert sent.status_code == 413
    text = b'{"model": "%s", "prompt": "a cat"}' % WAN.name.encode()
    assert (await client.post("/v1/videos", content=text.ljust(MAX_JSON_BYTES), headers=headers)).status_code == 200


async def test_the_local_key_finds_its_videos_again_after_a_restart(port: Port):
    admin = port.application.admin
    ids: list[str] = []
    for _ in range(2):  # each start creates another key
        local, text = new_key(admin.pepper, LOCAL_KEY_NAME, ["infer"], created=time.time())
        admin.ring.put(local)
        async with port.client_of(text) as client:
            ids.append((await client.post("/v1/videos", json=BODY)).json()["id"])
            assert [row["id"] for row in (await client.get("/v1/videos")).json()["data"]] == ids[::-1]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"state": JobState.FAILED, "fault": JobFault("no_headroom", "no memory")}, (409, "video_failed")),
        ({"state": JobState.COMPLETED, "expires": 1.0, "expired": True}, (404, "artifact_expired")),
        ({"state": JobState.COMPLETED}, (404, "video_not_found")),
        ({"state": JobState.COMPLETED, "files": ()}, (404, "variant_not_found")),
        ({"state": JobState.QUEUED}, (409, "video_not_completed")),
    ],
)
async def test_a_video_without_a_file_says_why(tmp_path: Path, changes: dict[str, Any], error: tuple[int, str]):
    (tmp_path / "state").mkdir(mode=0o700)
    files, name = (StoredFile("video.mp4", 1, "0" * 64),), f"video_{'0' * 24}"
    ended = {"ended": time.time(), "files": files} if changes["state"] != JobState.QUEUED else {}
    with closing(VideoStore(tmp_path / "state")) as store:
        store.put_job(a_job(1, **({"id": name} | ended | changes)))
    async with opened(tmp_path) as port, port.client("admin") as boss:
        assert get_error(await boss.get(f"/v1/videos/{name}/content")) == error
