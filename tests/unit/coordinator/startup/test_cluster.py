"""The cluster side of a started coordinator: the values that nodes get, and the parts that requests pass."""

import asyncio
import os
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from structlog.testing import capture_logs

from coordinator.cluster.links.link_server import LinkServer
from coordinator.cluster.registry import Registry
from coordinator.model_tools.benchmark import BENCHMARK_KEY, BENCHMARK_LIMITS
from coordinator.model_tools.quantizations import Quantizations
from coordinator.models.pull_controller import PullController
from coordinator.state.database import Database
from coordinator.state.settings import CoordinatorSettings
from coordinator.video.controller import VideoController
from router.admission.rate_limits import NO_LIMITS
from tests.support.cluster.cluster_port import hello
from tests.support.coordinator.started_coordinator import EPOCH, VERSION, started
from tests.unit.coordinator.video.state.test_job_table import a_job
from wire.frames import SHARED_SCOPE, Failed, Finished, Generate, PullModel
from wire.models.files import ModelFile, ModelManifest
from wire.refusals import RefusalCode

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def ask(client: httpx.AsyncClient, model: str = "tiny") -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(client.post("/v1/chat/completions", json=CHAT | {"model": model}))


@pytest.mark.parametrize(("share", "scope"), [("key", ""), ("pool", SHARED_SCOPE)])
async def test_requests_have_numbers_of_this_start_and_the_scope_of_the_settings(
    tmp_path: Path, share: str, scope: str
):
    settings = msgspec.convert({"cache": {"share": share}, "video": {"max_frames": 9}}, CoordinatorSettings)
    async with (
        started(tmp_path, settings) as made,
        made.client("infer") as client,
        made.linked(made.add_member("studio")) as (line, welcome),
    ):
        assert (welcome.epoch, welcome.cluster_name, welcome.version) == (EPOCH, "home", VERSION)
        assert welcome.addresses == (f"127.0.0.1:{made.cluster.port}",)
        assert made.cluster.video_controller.settings == settings.video
        for number in ((EPOCH << 40) + 1, (EPOCH << 40) + 2):
            asking = ask(client)
            asked = await line.until(Generate)
            assert (asked.request, asked.seq, asked.cache_scope) == (number, number, scope)
            line.send(Finished(asked.request, ("stop",), 3, 0))
            assert (await asking).status_code == 200


async def test_a_broken_request_is_logged_with_its_numbers_and_its_node(tmp_path: Path):
    async with (
        started(tmp_path) as made,
        made.client("infer") as client,
        made.linked(made.add_member("studio")) as (line, _),
    ):
        with capture_logs() as logs:
            asking = ask(client)
            asked = await line.until(Generate)
            line.send(Failed(asked.request, "bad_template", "the template failed"))
            answer = await asking
    broken = [entry for entry in logs if entry["event"] == "request broken"]
    assert [(entry["request"], entry["node"], entry["code"]) for entry in broken] == [
        (asked.request, "studio", "bad_template")
    ]
    assert broken[0]["request_id"] == answer.headers["x-request-id"]


async def test_the_benchmark_has_its_own_limits_and_keys_have_theirs(tmp_path: Path):
    async with started(tmp_path) as made:
        app = made.access.admin.create_key("app", ["infer"], None)["id"]
        quotas = made.cluster.dispatcher.quotas
        assert quotas.get_limits(BENCHMARK_KEY) == BENCHMARK_LIMITS
        assert quotas.get_limits(app) == NO_LIMITS


async def test_a_request_for_a_model_that_is_being_pulled_waits_for_it(tmp_path: Path):
    manifest = ModelManifest("pub/model", "c" * 40, (ModelFile("config.json", 5, "a" * 64),))
    async with started(tmp_path) as made, made.linked(node := made.add_member("studio")) as (line, _):
        made.cluster.pulls.start_pull(manifest, [node.node], "admin")
        assert (await line.until(PullModel)).order >> 40 == EPOCH
        refused = made.cluster.dispatcher.placer.find_pull("pub/model")
        assert refused is not None
        assert (refused.code, refused.message.partition(":")[0]) == (
            RefusalCode.NOT_READY,
            "pub/model is being pulled (it begins)",
        )
        assert made.cluster.dispatcher.placer.find_pull("pub/other") is None


async def test_a_proof_of_a_newer_coordinator_reaches_the_program(tmp_path: Path):
    async with started(tmp_path) as made:
        node = made.add_member("studio")
        line = await made.dial(node)
        line.send(hello(node, generation=9, seal=made.state.authority.seal_generation(9)))
        await line.ended()
    assert [(mark.generation, mark.node) for mark in made.superseded] == [(9, "studio")]


async def test_a_stop_ends_all_tasks_links_and_ports(tmp_path: Path):
    before = asyncio.all_tasks()
    async with started(tmp_path) as made, made.client("admin") as client:
        assert (await client.get("/api/v1/status")).status_code == 200
        line = await made.dial(node := made.add_member("studio"))
        line.send(hello(node))
        made.cluster.video_controller.records.put_job(a_job(1))
    assert await line.ended() is not None
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", made.cluster.port)
    for _ in range(3):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() <= before
    assert [name for name in sorted(os.listdir(tmp_path)) if ".db" in name] == ["cluster.db", "videos.db"], "no logs"


async def test_a_stop_closes_each_part_of_the_cluster_once_before_those_that_it_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The registry, the pulls and the quantizations have timers, which would act on a closed database."""
    closed = list[str]()

    def record(kind: type[Any]) -> None:
        close = kind.close
        monkeypatch.setattr(kind, "close", lambda part: closed.append(kind.__name__) or close(part))

    for kind in (LinkServer, PullController, Quantizations, VideoController, Registry, Database):
        record(kind)
    async with started(tmp_path):
        assert closed == []
    assert closed == ["LinkServer", "PullController", "Quantizations", "VideoController", "Registry", "Database"]
