"""`/v1/videos` with OpenAI's own library, against the complete application and peers on the real link."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from coordinator.state.access_admin import LOCAL_KEY_NAME
from coordinator.video.api import MAX_JSON_BYTES
from coordinator.video.settings import VideoSettings
from router.admission.api_keys import new_key
from router.admission.rate_limits import KeyLimits
from tests.support.cluster.cluster_port import Port, a_report, opened
from tests.support.cluster.loopback_cluster import a_memory
from tests.support.video.peer import CLIP, PICTURE, VideoPeer
from wire.frames import Generate, LeaseRelease, LeaseRequest
from wire.units import GIB
from wire.video import VideoPackage

pytestmark = pytest.mark.filterwarnings("ignore:.*Sora.*:DeprecationWarning", "ignore::DeprecationWarning")


class Pool:
    """A coordinator, its video nodes, and clients of it."""

    def __init__(self, port: Port, peers: list[VideoPeer]) -> None:
        self.port = port
        self.peers = peers
        self.conductor = port.application.conductor
        self.key = self.new_key()

    @property
    def peer(self) -> VideoPeer:
        return self.peers[0]

    def new_key(self, *scopes: str) -> str:
        return self.port.application.admin.create_key("k", list(scopes) or ["infer"], None)["key"]

    def http(self, key: str = "") -> httpx.AsyncClient:
        return self.port.client_of(key or self.key)

    def sdk(self, key: str = "") -> openai.AsyncOpenAI:
        http: Any = self.http(key)  # answered by the application itself, without a socket
        return openai.AsyncOpenAI(
            base_url="http://127.0.0.1/v1", api_key=key or self.key, http_client=http, max_retries=0
        )

    async def until(self, video: str, status: str, seconds: float = 60.0, key: str = "") -> dict[str, Any]:
        async with asyncio.timeout(seconds), self.http(key) as http:
            while (found := (await http.get(f"/v1/videos/{video}")).json())["status"] != status:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        return found


@asynccontextmanager
async def pool(folder: Path, *names: str, peer: dict[str, Any] | None = None, **settings: Any) -> AsyncIterator[Pool]:
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(opened(folder, video=VideoSettings(**settings)))
        peers = [VideoPeer(port, name, **(peer or {})) for name in names or ("a",)]
        made = Pool(port, peers)
        for one in peers:
            await one.link()
        yield made


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pool]:
    """Yield one pool for all refused requests: none may ever become a job."""
    async with pool(tmp_path_factory.mktemp("shared")) as one:
        await one.port.link(one.port.member("without videos"))
        yield one
        assert one.conductor.table.jobs == {}
        assert one.conductor.take_snapshot().used, "a node offers videos"
        assert one.peer.of(LeaseRequest) == []


async def made(one: Pool, client: openai.AsyncOpenAI, **fields: Any) -> Any:
    asked: dict[str, Any] = {"model": "wan", "prompt": "a fox in the snow"} | fields
    video = await client.videos.create(**asked)
    await one.until(video.id, "completed")
    return video


# Calls of the library


async def test_create_poll_download_delete(tmp_path: Path):
    async with pool(tmp_path) as one, one.sdk() as client:
        video = await client.videos.create_and_poll(
            model="wan",
            prompt="a fox",
            seconds="4",
            size="1280x720",
            poll_interval_ms=20,
            extra_body={"steps": 8, "seed": 7, "fps": 8, "negative_prompt": "blur", "guidance": 4.5},
        )
        assert (video.status, video.progress, video.size, video.seconds) == ("completed", 100, "1280x720", "4.125")
        assert (video.object, video.model, video.prompt, video.error) == ("video", "wan", "a fox", None)
        assert video.expires_at is not None
        assert video.completed_at is not None
        assert video.expires_at - video.completed_at == pytest.approx(86400, abs=1)
        assert video.model_extra is not None
        assert {name: video.model_extra[name] for name in ("frames", "fps", "steps", "seed", "phase")} == {
            "frames": 33,
            "fps": 8,
            "steps": 8,
            "seed": 7,
            "phase": "completed",
        }
        (lease,) = one.peer.of(LeaseRequest)
        assert lease.size == 36 * GIB
        assert json.loads(lease.spec) == {
            "prompt": "a fox",
            "width": 1280,
            "height": 720,
            "frames": 33,
            "fps": 8,
            "steps": 8,
            "negative_prompt": "blur",
            "guidance": 4.5,
            "seed": 7,
        }
        content = await client.videos.download_content(video.id)
        assert content.read() == CLIP
        assert content.response.headers["content-type"] == "video/mp4"
        picture = await client.videos.download_content(video.id, variant="thumbnail")
        assert picture.read() == PICTURE
        assert (await client.videos.delete(video.id)).deleted
        with pytest.raises(openai.NotFoundError) as gone:
            await client.videos.retrieve(video.id)
        assert gone.value.code == "video_not_found"
        await one.port.until(lambda: not (tmp_path / "state" / "videos" / video.id).exists())


async def test_video_create_accepts_json_and_returns_a_poll_interval(tmp_path: Path):
    async with pool(tmp_path, peer={"plays": False}) as one, one.http() as http:
        answer = await http.post("/v1/videos", json={"prompt": "a fox", "seconds": 3, "size": "480x272"})
        assert answer.status_code == 200
        assert answer.headers["openai-poll-after-ms"] == "2000"
        assert answer.json()["model"] == "wan", "the only one that the pool has"
        assert answer.json()["status"] in ("queued", "in_progress")


async def test_pages_of_ones_own_videos(tmp_path: Path):
    async with pool(tmp_path) as one, one.sdk() as client, one.sdk(one.new_key()) as other:
        ids = [(await made(one, client)).id for _ in range(5)]
        assert [video.id async for video in client.videos.list(limit=2)] == ids[::-1]
        assert [video.id async for video in client.videos.list(limit=1, order="asc")] == ids
        page = await client.videos.list(limit=2, after=ids[3])
        assert [video.id for video in page.data] == [ids[2], ids[1]]
        assert page.has_more
        assert not (await client.videos.list(limit=2, after=ids[2])).has_more, "the last two"
        assert [video.id async for video in other.videos.list()] == []
        async with one.http() as http:
            limits = ("0", "101", "x", "9999999999999", "0000000050999", "000000005" + 5000 * "0")
            for query in (*(f"limit={limit}" for limit in limits), "order=up", "after=video_1"):
                assert (await http.get(f"/v1/videos?{query}")).status_code == 400, query


async def test_the_limit_of_a_key_counts_its_open_videos(tmp_path: Path):
    async with pool(tmp_path) as one:
        made = one.port.application.admin.create_key("one", ["infer"], None, KeyLimits(concurrency=1))
        async with one.sdk(made["key"]) as client:
            for _ in range(2):
                first = await client.videos.create(model="wan", prompt="a fox")
                await one.until(first.id, "completed", key=made["key"])
            one.peer.plays = False
            await client.videos.create(model="wan", prompt="a fox")
            with pytest.raises(openai.RateLimitError, match="1 open video"):
                await client.videos.create(model="wan", prompt="a fox")


async def test_the_limit_of_queued_videos_of_a_key_does_not_count_the_one_in_progress(tmp_path: Path):
    async with pool(tmp_path, peer={"plays": False}) as one:
        made = one.port.application.admin.create_key("two", ["infer"], None, KeyLimits(waiting=1))
        async with one.sdk(made["key"]) as client:
            first = await client.videos.create(model="wan", prompt="a fox")
            await one.until(first.id, "in_progress", key=made["key"])
            await client.videos.create(model="wan", prompt="a fox")
            with pytest.raises(openai.RateLimitError, match="1 queued video, and it has 1"):
                await client.videos.create(model="wan", prompt="a fox")


async def test_jobs_are_there_for_their_own_key_and_for_admins(tmp_path: Path):
    async with pool(tmp_path) as one, one.sdk() as client:
        video = await made(one, client)
        async with one.http(one.new_key("infer")) as other, one.http(one.new_key("admin")) as admin:
            for method, path in (("GET", ""), ("GET", "/content"), ("POST", "/cancel"), ("DELETE", "")):
                answer = await other.request(method, f"/v1/videos/{video.id}{path}")
                assert (answer.status_code, answer.json()["error"]["code"]) == (404, "video_not_found")
            assert (await admin.get(f"/v1/videos/{video.id}/content")).content == CLIP
            assert [found["id"] for found in (await admin.get("/v1/videos")).json()["data"]] == [video.id]


# one range


async def test_one_range_is_sent_and_nothing_more(tmp_path: Path):
    async with pool(tmp_path) as one, one.sdk() as client, one.http() as http:
        url = f"/v1/videos/{(await made(one, client)).id}/content"
        size = len(CLIP)
        whole = await http.get(url)
        tag = whole.headers["etag"]
        for header, status, expected in (
            ("bytes=0-99", 206, CLIP[:100]),
            ("bytes=100-", 206, CLIP[100:]),
            ("bytes=-7", 206, CLIP[-7:]),
            (f"bytes={size - 1}-{size + 5}", 206, CLIP[-1:]),
            (f"bytes=-{size * 9}", 206, CLIP),
            ("bytes=0-1,5-6", 200, CLIP),
            ("bytes=" + ",".join(["0-"] * 500), 200, CLIP),
            ("lines=0-5", 200, CLIP),
            ("bytes=9-5", 200, CLIP),
            ("bytes=x-", 200, CLIP),
            ("bytes=-", 200, CLIP),
        ):
            answer = await http.get(url, headers={"range": header})
            assert (answer.status_code, answer.content == expected) == (status, True), header[:40]
            assert ("content-range" in answer.headers) == (status == 206)
        assert (await http.get(url, headers={"range": "bytes=0-9"})).headers["content-range"] == f"bytes 0-9/{size}"
        for header in (f"bytes={size}-", "bytes=-0", f"bytes={10**17}-"):
            answer = await http.get(url, headers={"range": header})
            assert (answer.status_code, answer.headers["content-range"]) == (416, f"bytes */{size}"), header
            assert answer.json()["error"]["code"] == "range_not_satisfiable"
        for condition, status in ((tag, 206), ('"other"', 200), ("Sat, 21 Nov 2026 00:00:00 GMT", 200)):
            headers = {"range": "bytes=0-9", "if-range": condition}
            assert (await http.get(url, headers=headers)).status_code == status
        head = await http.head(url, headers={"range": "bytes=0-9"})
        assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", str(size))


async def test_content_whose_file_was_removed_by_hand_is_not_found(tmp_path: Path):
    async with pool(tmp_path) as one, one.sdk() as client, one.http() as http:
        video = await made(one, client)
        url = f"/v1/videos/{video.id}/content"
        assert (await http.get(url)).headers["cache-control"] == "private"
        (one.conductor.artifacts.get_folder(video.id) / "video.mp4").unlink()
        answer = await http.get(url)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "video_not_found")


async def test_content_of_a_missing_video_or_variant_is_refused(tmp_path: Path):
    async with pool(tmp_path, peer={"plays": False, "files": {"video.mp4": CLIP}}) as one, one.sdk() as client:
        video = await client.videos.create(model="wan", prompt="x")
        await one.until(video.id, "in_progress")
        async with one.http() as http:
            answer = await http.get(f"/v1/videos/{video.id}/content")
            assert (answer.status_code, answer.headers["x-should-retry"]) == (409, "false")
            assert answer.json()["error"]["code"] == "video_not_completed"
            one.peer.finish(next(iter(one.peer.leases)))
            await one.until(video.id, "completed")
            for variant, status, code in (
                ("thumbnail", 404, "variant_not_found"),
                ("spritesheet", 400, "unsupported_parameter"),
                ("x" * 99, 400, None),
            ):
                answer = await http.get(f"/v1/videos/{video.id}/content?variant={variant}")
                assert answer.status_code == status
                assert code in (None, answer.json()["error"]["code"])


async def test_expired_video_content_is_a_404(tmp_path: Path):
    async with pool(tmp_path, keep_count=1) as one, one.sdk() as client:
        first, second = await made(one, client), await made(one, client)
        with pytest.raises(openai.NotFoundError) as gone:
            await client.videos.download_content(first.id)
        assert gone.value.code == "artifact_expired"
        assert "expires_at" in gone.value.message
        assert (await client.videos.retrieve(first.id)).status == "completed", "the record stays"
        assert (await client.videos.download_content(second.id)).read() == CLIP


# ending


async def test_cancel_and_delete_while_it_waits_and_while_it_is_made(tmp_path: Path):
    async with pool(tmp_path, peer={"plays": False}) as one, one.sdk() as client, one.http() as http:
        running, waiting = [await client.videos.create(model="wan", prompt="x") for _ in range(2)]
        await one.until(running.id, "in_progress")
        answer = await http.post(f"/v1/videos/{waiting.id}/cancel")
        assert (answer.json()["status"], answer.json()["error"]["code"]) == ("failed", "cancelled")
        again = await http.post(f"/v1/videos/{waiting.id}/cancel")
        assert again.json() == answer.json(), "it has ended already"
        await client.videos.delete(running.id)
        await one.port.until(lambda: not one.conductor.table.holds)
        await one.port.until(lambda: len(one.peer.of(LeaseRelease)) > 1)
        assert [said.cause for said in one.peer.of(LeaseRelease)][:2] == ["cancelled", "acknowledged"]


async def test_deleting_while_it_is_read_does_no_harm(tmp_path: Path):
    async with pool(tmp_path) as one, one.sdk() as client, one.http() as http:
        video = await made(one, client)
        reading = [asyncio.create_task(http.get(f"/v1/videos/{video.id}/content")) for _ in range(5)]
        await client.videos.delete(video.id)
        for answer in await asyncio.gather(*reading):
            assert answer.status_code == 404 or answer.content == CLIP


async def test_download_of_a_deleted_video_completes(tmp_path: Path):
    async with pool(tmp_path) as one, one.sdk() as client:
        video = await made(one, client)
        got: list[bytes] = []

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body" and message.get("body"):
                got.append(message["body"])
                if len(got) == 1:
                    assert message["more_body"], "there is more to come"
                    await client.videos.delete(video.id)
                    await one.port.until(lambda: not (tmp_path / "state" / "videos" / video.id).exists())

        async def receive() -> Any:
            await asyncio.Event().wait()

        path = f"/v1/videos/{video.id}/content"
        headers = [(b"authorization", f"Bearer {one.key}".encode()), (b"host", b"127.0.0.1")]
        scope = {
            "type": "http",
            "method": "GET",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "scheme": "http",
            "http_version": "1.1",
            "asgi": {"version": "3.0"},
            "root_path": "",
        }
        await one.port.application.app(scope, receive, send)
        assert b"".join(got) == CLIP


# the queue


async def test_full_video_queue_is_a_429_with_retry_after(tmp_path: Path):
    async with pool(tmp_path, peer={"muted": True}, queue_limit=2) as one, one.sdk() as client:
        for _ in range(3):  # one whose lease is requested, two that wait
            await client.videos.create(model="wan", prompt="x")
            await asyncio.sleep(0)
        with pytest.raises(openai.RateLimitError) as full:
            await client.videos.create(model="wan", prompt="x")
        assert full.value.code == "queue_full"
        assert int(full.value.response.headers["retry-after"]) >= 1


async def test_an_idempotency_key_makes_one_job(tmp_path: Path):
    async with pool(tmp_path, peer={"muted": True}) as one, one.http() as http, one.http(one.new_key()) as other:
        headers, body = {"idempotency-key": "abc"}, {"prompt": "x"}
        answers = await asyncio.gather(*(http.post("/v1/videos", json=body, headers=headers) for _ in range(3)))
        assert len({answer.json()["id"] for answer in answers}) == 1
        changed = await http.post("/v1/videos", json={"prompt": "y"}, headers=headers)
        assert (changed.status_code, changed.json()["error"]["code"]) == (409, "idempotency_key_reused")
        assert changed.headers["x-should-retry"] == "false"
        theirs = await other.post("/v1/videos", json=body, headers=headers)
        assert theirs.json()["id"] != answers[0].json()["id"], "it is a name within a key"
        assert (await http.post("/v1/videos", json=body, headers={"idempotency-key": "x" * 201})).status_code == 400
        admin, repeated = one.port.application.admin, list[str]()
        for _ in range(2):  # each start of the coordinator has another local key
            local, text = new_key(admin.pepper, LOCAL_KEY_NAME, ["admin"], created=0.0)
            admin.ring.put(local)
            async with one.http(text) as client:
                repeated.append((await client.post("/v1/videos", json=body, headers=headers)).json()["id"])
        assert repeated[0] == repeated[1] != theirs.json()["id"]


# Refusals and errors


@pytest.mark.parametrize(
    ("fields", "status", "param", "words"),
    [
        ({"size": "9999x9999"}, 400, "size", "4096"),
        ({"size": "99999x9"}, 400, "size", "4096"),
        ({"size": "0x0"}, 400, "size", "32"),
        ({"size": "1920x1080"}, 400, "size", "921600"),
        ({"size": "1024x1792"}, 400, "size", "921600"),
        ({"size": "big"}, 400, "size", ""),
        ({"size": "-480x272"}, 400, "size", ""),
        ({"seconds": "8.5"}, 400, "seconds", "whole number"),
        ({"seconds": "8"}, 400, "seconds", "fps 15 would fit"),
        ({"seconds": "0"}, 400, "seconds", "1 or more"),
        ({"seconds": "-4"}, 400, "seconds", "1 or more"),
        ({"seconds": "١"}, 400, "seconds", "whole number"),
        ({"seconds": "9" * 400}, 400, "seconds", "whole number"),
        ({"extra_body": {"frames": "122"}}, 400, "frames", "121"),
        ({"extra_body": {"frames": "0"}}, 400, "frames", "121"),
        ({"extra_body": {"frames": "49", "seconds": "3"}}, 400, "frames", "two ways"),
        ({"extra_body": {"steps": "51"}}, 400, "steps", "50"),
        ({"extra_body": {"steps": "0"}}, 400, "steps", "50"),
        ({"extra_body": {"fps": "1000"}}, 400, "fps", "60"),
        ({"extra_body": {"seed": "-1"}}, 400, "seed", ""),
        ({"extra_body": {"guidance": "hot"}}, 400, "guidance", "number"),
        ({"extra_body": {"guidance": "1e9"}}, 400, "guidance", "number"),
        ({"extra_body": {"quality": "hd"}}, 400, "quality", "unknown field"),
        ({"prompt": ""}, 400, "prompt", ""),
        ({"prompt": " \n"}, 400, "prompt", ""),
        ({"prompt": "x" * 8001}, 400, "prompt", "8000"),
        ({"prompt": "x" * 70_000}, 413, None, "65536"),
        ({"model": "sora-2"}, 404, "model", "nearest names are wan"),
        ({"model": "tiny"}, 400, "model", "/v1/chat/completions"),
        ({"model": "../../etc/passwd"}, 404, "model", ""),
        ({"input_reference": ("a.png", b"\x89PNG" + b"x" * 2_000_000, "image/png")}, 400, "input_reference", "image"),
        ({"extra_body": {"n": "2"}}, 400, "n", "one clip"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_body_that_cannot_be_is_refused_by_name(
    shared: Pool, fields: dict[str, Any], status: int, param: str | None, words: str
):
    asked: dict[str, Any] = {"model": "wan", "prompt": "x"} | fields
    async with shared.sdk() as client:
        with pytest.raises(openai.APIStatusError) as refused:
            await client.videos.create(**asked)
        error = refused.value
        assert (error.status_code, error.param) == (status, param), error.message
        assert words in error.message
        assert shared.peer.of(LeaseRequest) == []
        assert shared.conductor.table.jobs == {}


async def test_rounded_video_size_has_a_warning(tmp_path: Path):
    async with pool(tmp_path, peer={"muted": True}) as one, one.http() as http:
        answer = (await http.post("/v1/videos", json={"prompt": "x", "size": "470x270", "frames": 90})).json()
        assert (answer["size"], answer["frames"], answer["seconds"]) == ("480x272", 93, "5.812")
        assert ["480x272" in answer["warnings"][0], "93" in answer["warnings"][1], "81" in answer["warnings"][2]] == [
            True,
            True,
            True,
        ]


async def test_video_that_fits_no_node_is_a_413_with_numbers(tmp_path: Path):
    package = VideoPackage("wan", engine="0.38.0", bits=8, expert=int(14.35 * GIB))
    async with pool(tmp_path, peer={"package": package}) as one, one.http() as http:
        answer = await http.post("/v1/videos", json={"prompt": "x", "size": "384x224"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (413, "video_memory_exceeded", "size")
        assert "uncalibrated" in error["message"]
        memory = error["memory"]
        assert memory["predicted"] > memory["ceiling"] == 36 * GIB
        assert (memory["headroom"], memory["reserved"]) == (memory["ceiling"] - memory["predicted"], 0)


async def test_where_no_cap_holds_a_lease_it_is_a_413(tmp_path: Path):
    async with pool(tmp_path, peer={"report_changes": {"memory": a_memory(8 * GIB)}}) as one, one.http() as http:
        answer = await http.post("/v1/videos", json={"prompt": "x", "size": "384x224"})
        assert answer.status_code == 413
        assert "no node could ever lend 36.0 GiB" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("peer", "settings", "code"),
    [
        ({"report_changes": {"memory": a_memory(80 * GIB, 128 * GIB, guard=False)}}, {}, "guard_off"),
        ({"video": {"ready": False, "cause": "no environment: run cluster video install"}}, {}, "video_not_ready"),
        ({}, {"enabled": False}, "video_disabled"),
    ],
)
async def test_where_no_videos_are_made_it_is_a_503(
    tmp_path: Path, peer: dict[str, Any], settings: dict[str, Any], code: str
):
    async with pool(tmp_path, peer=peer, **settings) as one, one.http() as http:
        answer = await http.post("/v1/videos", json={"prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, code)
        assert ("cluster video install" in answer.text) == (code == "video_not_ready")


async def test_without_a_node_that_is_allowed_it_is_a_503_that_names_the_command(tmp_path: Path):
    async with pool(tmp_path, peer={"permitted": False}) as one, one.http() as http:
        answer = await http.post("/v1/videos", json={"prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "video_not_ready")
        assert "`cluster node allow-video a`" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("content_type", "body", "words"),
    [
        ("text/plain", b'{"prompt":"x"}', "application/json or multipart"),
        ("application/x-www-form-urlencoded", b"prompt=x", "application/json or multipart"),
        ("multipart/form-data", b"--x\r\n", "application/json or multipart"),
        ("multipart/form-data; boundary=" + "x" * 300, b"--x\r\n", "oundary"),
        ("multipart/form-data; boundary=x", b"", "no end"),
        ("multipart/form-data; boundary=x", b"junk", "form"),
        ("multipart/form-data; boundary=x", b'--x\r\ncontent-disposition: form-data; name="prompt"\r\n\r\nx', "no end"),
        ("multipart/form-data; boundary=x", b"--x\r\ncontent-disposition: form-data\r\n\r\nx\r\n--x--\r\n", "no name"),
        ("multipart/form-data; boundary=x", b"--x\r\n\r\nx\r\n--x--\r\n", "no name"),
        (
            "multipart/form-data; boundary=x",
            b'--x\r\ncontent-disposition: form-data; name="prompt"\r\n\r\n\xff\xfe\r\n--x--\r\n',
            "UTF-8",
        ),
        (
            "multipart/form-data; boundary=x",
            b'--x\r\ncontent-disposition: form-data; name="prompt"\r\n\r\nx\r\n' * 2 + b"--x--\r\n",
            "twice",
        ),
        (
            "multipart/form-data; boundary=x",
            b'--x\r\ncontent-disposition: form-data; name="f"; filename="../../x"\r\n\r\nx\r\n--x--\r\n',
            "not read here",
        ),
        (
            "multipart/form-data; boundary=x",
            b"".join(b'--x\r\ncontent-disposition: form-data; name="a%d"\r\n\r\nx\r\n' % n for n in range(40)),
            "32",
        ),
        ("multipart/form-data; boundary=x", b"--x\r\n" + b"a: " + b"b" * 5000 + b"\r\n\r\n", "form cannot be read"),
        ("multipart/form-data; boundary=x", b"--x\r\n" + b"a: b\r\n" * 20 + b"\r\n", "form cannot be read"),
        ("application/json", b'{"prompt":"x","prompt":"y"}', "twice"),
        ("application/json", b"[]", "object"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_body_that_is_none_is_a_400(shared: Pool, content_type: str, body: bytes, words: str):
    async with shared.http() as http:
        answer = await http.post("/v1/videos", content=body, headers={"content-type": content_type})
        assert answer.status_code == 400, answer.text
        assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize("content_type", ["application/json", "multipart/form-data; boundary=x"])
@pytest.mark.asyncio(loop_scope="module")
async def test_a_hundred_megabytes_are_not_read(shared: Pool, content_type: str):
    async with shared.http() as http:
        head = {"content-type": content_type, "content-length": str(100 * 2**20)}
        assert (await http.post("/v1/videos", content=b"{}", headers=head)).status_code == 413

        async def endless() -> AsyncIterator[bytes]:
            yield b'--x\r\ncontent-disposition: form-data; name="prompt"\r\n\r\n'
            for _ in range(1600):
                yield b"x" * 65536

        answer = await http.post("/v1/videos", content=endless(), headers={"content-type": content_type})
        assert answer.status_code == 413, answer.text
        long = json.dumps({"prompt": "x" * MAX_JSON_BYTES})
        answer = await http.post("/v1/videos", content=long, headers={"content-type": content_type})
        assert answer.status_code == (413 if content_type == "application/json" else 400), "an object has a lower limit"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", ""),
        ("GET", ""),
        ("POST", "/edits"),
        ("POST", "/video_1/remix"),
        ("GET", "/video_1"),
        ("DELETE", "/video_1"),
        ("GET", "/video_1/content"),
        ("POST", "/video_1/cancel"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_every_route_needs_a_key_with_its_scope(shared: Pool, method: str, path: str):
    for key, status in (("mp-unknown", 401), (shared.new_key("metrics"), 403)):
        async with shared.http(key) as http:
            answer = await http.request(method, f"/v1/videos{path}")
            assert answer.status_code == status, answer.text
            assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "name",
    [
        "x",
        "..",
        "../../cluster.db",
        "video_",
        "video_" + "0" * 24,
        "video_" + "g" * 24,
        "%2e%2e%2fcluster.db",
        "video_0000%00",
        "x" * 5000,
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_ids_that_are_none(shared: Pool, name: str):
    async with shared.http() as http:
        for method, path in (("GET", ""), ("GET", "/content"), ("POST", "/cancel"), ("DELETE", "")):
            answer = await http.request(method, f"/v1/videos/{name}{path}")
            assert answer.status_code in (404, 405), (method, path)


@pytest.mark.parametrize(
    ("path", "words"),
    [("video_1/remix", "remix"), ("edits", "edits"), ("extensions", "extensions"), ("characters", "characters")],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_unsupported_field_is_refused_by_name(shared: Pool, path: str, words: str):
    async with shared.http() as http:
        answer = await http.post(f"/v1/videos/{path}", json={"prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_parameter")
        assert words in answer.json()["error"]["message"]
        assert (await http.get("/v1/videos/characters/x")).status_code == 400


# video models are not for chats


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}),
        ("/v1/responses", {"input": "x"}),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_chat_on_a_video_model_names_the_route_and_evicts_nothing(
    shared: Pool, path: str, body: dict[str, Any]
):
    async with shared.http() as http:
        answer = await http.post(path, json={"model": "wan", **body})
        assert answer.status_code == 400
        assert "POST /v1/videos" in answer.text
        assert shared.peer.of(Generate) == []
        listed = (await http.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["tiny"], "what is listed there can chat"
        found = (await http.get("/api/v1/videos/models")).json()
        assert [model["name"] for model in found["models"]] == ["wan"]


def test_a_report_without_video_is_as_before():
    assert a_report().video.packages == ()
