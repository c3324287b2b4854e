"""`cluster place`, `cluster explain` and `cluster models` with aliases, from the API to the printed text."""

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from coordinator.cli.commands.models import print_models
from coordinator.cli.request_table import print_placement, print_request, print_requests
from router.settings import RouterSettings
from router.upstreams import UpstreamSettings
from tests.support.cluster.application import application
from tests.support.cluster.loopback_cluster import LoopbackCluster, LoopbackNode, a_memory, a_model
from wire.units import GIB

BIG = a_model("big-30b", weights=60 * GIB, loaded=False)
SMALL = a_model("small-8b")
SETTINGS = RouterSettings(aliases={"coder": ("nowhere", "big-30b", "small-8b")})


@contextlib.asynccontextmanager
async def admin_of(folder: Path, settings: RouterSettings = SETTINGS) -> AsyncIterator[httpx.AsyncClient]:
    cluster = LoopbackCluster(LoopbackNode("studio", a_memory(), (BIG, SMALL)), settings=settings)
    async with application(folder, over=cluster) as built, cluster.serving() as url:
        headers = {"authorization": f"Bearer {built.admin.create_key('boss', ['admin'], None)['key']}"}
        async with httpx.AsyncClient(base_url=url, headers=headers, trust_env=False, timeout=60) as client:
            yield client


async def test_place_shows_the_candidate_that_would_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    async with admin_of(tmp_path) as client:
        answer = (await client.post("/api/v1/place", json={"model": "coder"})).json()
        refused = await client.post("/api/v1/place", json={"model": "coder", "prompt_tokens": 10**8})
        plain = (await client.post("/api/v1/place", json={"model": "small-8b"})).json()
    assert (answer["alias"], answer["model"], answer["name"]) == ("coder", "small-8b", "studio")
    assert [one["model"] for one in answer["passed_over"]] == ["nowhere", "big-30b"]
    print_placement(answer)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "passed over nowhere: no node serves nowhere"
    assert lines[1].startswith("passed over big-30b: needs 6")
    assert lines[-1] == "would go to studio with small-8b"
    found: dict[str, Any] = refused.json()
    assert (found["node"], found["model"], len(found["passed_over"])) == (None, "nowhere", 3)
    assert (plain["alias"], plain["model"], plain["passed_over"]) == ("", "small-8b", [])


async def test_explain_names_the_alias_and_why_each_candidate_was_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    async with admin_of(tmp_path) as client:
        chat = {"model": "coder", "messages": [{"role": "user", "content": "hi"}]}
        sent = await client.post("/v1/chat/completions", json=chat, headers={"x-request-id": "mine-1"})
        assert sent.status_code == 200
        found = (await client.get("/api/v1/requests/mine-1")).json()
        listed = (await client.get("/api/v1/requests")).json()
    (record,) = found["requests"]
    assert (record["alias"], record["model"]) == ("coder", "small-8b")
    print_request(found)
    told = capsys.readouterr().out
    assert "  alias coder\n    nowhere passed over: no node serves nowhere\n    big-30b passed over: needs 6" in told
    assert "decided about big-30b " in told
    print_requests(listed, wide=True)
    assert "passed over" in capsys.readouterr().out


async def test_models_lists_the_aliases(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    async with admin_of(tmp_path) as client:
        answer = (await client.get("/api/v1/models")).json()
        live = (await client.get("/api/v1/live")).text
    assert f"event: aliases\ndata: {json.dumps(answer['aliases'], separators=(',', ':'))}\n" in live, "on the page"
    row = {"name": "coder", "candidates": ["nowhere", "big-30b", "small-8b"], "upstream": None, "served": None}
    assert answer["aliases"] == [row]
    upstreams = {"home": UpstreamSettings(url="http://127.0.0.1:1/v1", model="far")}
    settings = RouterSettings(aliases={"coder": ("nowhere", "upstream:home")}, upstreams=upstreams)
    async with admin_of(tmp_path / "other", settings) as client:
        (alias,) = (await client.get("/api/v1/models")).json()["aliases"]
    assert (alias["candidates"], alias["upstream"]) == (["nowhere"], "home")
    print_models({"models": [], "aliases": [row | {"upstream": "cloud", "served": "small-8b"}]}, wide=False)
    text = "alias coder: nowhere, then big-30b, then small-8b, then upstream cloud (first one on a node: small-8b)"
    assert text in capsys.readouterr().out
