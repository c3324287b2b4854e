"""Commands that are answered before their end: their response, their rows on the live page, and their bounds."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from weakref import ref

import httpx
import pytest
from fastapi import Request

from coordinator.api.deferred_commands import (
    LISTED_SECONDS,
    MAX_ENDED,
    MAX_RUNNING,
    PREFERS_ASYNC,
    DeferredCommands,
    has_async_preference,
)
from coordinator.api.errors import ProblemError
from coordinator.api.routes.models import ModelBody
from coordinator.state.store_errors import StoreError
from tests.support.cluster.cluster_port import Line, Port, a_report, opened
from tests.support.cluster.loopback_cluster import a_memory, a_model
from wire.frames import Finished, LoadModel, ModelOrderCode, ModelOrderEnded, VerifyModel
from wire.units import GIB


class Answer(dict[str, Any]):
    """Answer of a command that weak references can refer to."""


DEFER = {"prefer": "respond-async"}
BODY = {"model": "tiny", "node": "studio"}


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[Port]:
    async with opened(tmp_path) as made:
        yield made


@pytest.fixture
async def boss(port: Port) -> AsyncIterator[httpx.AsyncClient]:
    async with port.client("admin") as made:
        yield made


async def link(port: Port) -> Line:
    who = port.member("studio")
    line = await port.link(who, a_report(models=(a_model("tiny", loaded=False),), memory=a_memory(8 * GIB)))
    await port.until(lambda: port.state(who) == "ready")
    return line


async def read_rows(boss: httpx.AsyncClient) -> list[dict[str, Any]]:
    events = (await boss.get("/api/v1/live")).text.split("\n\n")
    (data,) = [event.split("\ndata: ")[1] for event in events if event.startswith("event: commands\n")]
    return json.loads(data)


async def wait_for_end(boss: httpx.AsyncClient) -> dict[str, Any]:
    async with asyncio.timeout(10):
        while True:
            (row,) = await read_rows(boss)
            if row["state"] != "running":
                return row
            await asyncio.sleep(0)


async def test_a_deferred_load_is_answered_at_once_and_its_end_is_on_the_page(port: Port, boss: httpx.AsyncClient):
    line = await link(port)
    answer = await boss.post("/api/v1/models/load", json=BODY, headers=DEFER)
    assert (answer.status_code, answer.headers["preference-applied"]) == (202, "respond-async")
    started = answer.json()["command"]
    assert (started["name"], started["model"], started["node"]) == ("load", "tiny", "studio")
    assert (started["state"], started["ended"]) == ("running", None)
    assert await read_rows(boss) == [started]
    order = await line.until(LoadModel)
    assert "load" not in [row["action"] for row in (await boss.get("/api/v1/audit")).json()["acts"]]
    line.send(Finished(order.request, (), 0, 0))
    row = await wait_for_end(boss)
    assert (row["id"], row["state"], row["message"]) == (started["id"], "completed", "")
    assert row["answer"]["node"]["name"] == "studio"
    assert "load" in [row["action"] for row in (await boss.get("/api/v1/audit")).json()["acts"]]


async def test_a_deferred_command_that_fails_has_the_reason_on_the_page(port: Port, boss: httpx.AsyncClient):
    line = await link(port)
    assert (await boss.post("/api/v1/models/verify", json=BODY, headers=DEFER)).status_code == 202
    order = await line.until(VerifyModel)
    line.send(ModelOrderEnded(order.order, ModelOrderCode.CONTENT_MISMATCH, "model.safetensors has other content"))
    row = await wait_for_end(boss)
    assert (row["state"], row["answer"]) == ("failed", None)
    assert row["message"] == "studio: model.safetensors has other content"
    wrong = await boss.post("/api/v1/models/verify", json={"model": "tiny"}, headers=DEFER)
    assert wrong.status_code == 400, "an invalid body is refused at once"


async def test_deferred_commands_are_bounded_in_number_and_time():
    now, release = [1000.0], asyncio.Event()
    commands = DeferredCommands(lambda: now[0])

    async def load(body: ModelBody) -> dict[str, Any]:
        if body.model == "wrong":
            raise ValueError
        if body.model == "unwritten":
            raise StoreError("the disk is full")
        await release.wait()
        return {"schema": 1}

    PREFERS_ASYNC.set(True)
    start = commands.wrap(load)
    for _ in range(MAX_RUNNING):
        await start(body=ModelBody(model="tiny"))
    with pytest.raises(ProblemError, match="64 commands run"):
        await start(body=ModelBody(model="tiny"))
    now[0] += 7.0
    release.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    rows = commands.build_rows()
    assert [(row["started"], row["ended"]) for row in rows] == [(1000.0, 1007.0)] * MAX_ENDED
    for _ in range(MAX_RUNNING):  # ended commands that are listed take no place
        await start(body=ModelBody(model="tiny"))
    await asyncio.sleep(0)
    now[0] += LISTED_SECONDS
    await start(body=ModelBody(model="wrong"))
    await asyncio.sleep(0)
    now[0] += 1.0
    (row,) = commands.build_rows()
    assert (row["state"], row["message"]) == ("failed", "internal error of the coordinator: look at `cluster logs`")
    await start(body=ModelBody(model="unwritten"))
    await asyncio.sleep(0)
    row, *_ = commands.build_rows()
    assert (row["state"], row["message"]) == ("failed", "the disk is full")


async def test_the_command_that_ended_last_is_listed_first():
    release = {name: asyncio.Event() for name in ("a", "b")}
    commands = DeferredCommands(lambda: 1000.0)

    async def load(body: ModelBody) -> dict[str, Any]:
        await release[body.model].wait()
        return {"schema": 1}

    PREFERS_ASYNC.set(True)
    start = commands.wrap(load)
    for name in ("a", "b"):
        await start(body=ModelBody(model=name))
    assert [row["model"] for row in commands.build_rows()] == ["b", "a"]
    for name in ("b", "a"):
        release[name].set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert [row["model"] for row in commands.build_rows()] == ["a", "b"]


async def test_ended_commands_are_deleted_while_no_page_lists_them():
    commands, answers = DeferredCommands(), list[ref[Answer]]()

    async def load(body: ModelBody) -> Answer:
        answer = Answer()
        answers.append(ref(answer))
        return answer

    PREFERS_ASYNC.set(True)
    start = commands.wrap(load)
    for _ in range(2 * MAX_ENDED):
        await start(body=ModelBody(model="tiny"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert MAX_ENDED <= sum(answer() is not None for answer in answers) <= MAX_ENDED + 1
    assert len(commands.build_rows()) == MAX_ENDED


@pytest.mark.parametrize(
    ("value", "deferred"), [("wait=5, Respond-Async; x=1", True), ("wait=5", False), ("respond-asynchronously", False)]
)
def test_the_preference_is_one_of_a_list(value: str, deferred: bool):
    request = Request({"type": "http", "headers": [(b"prefer", value.encode())]})
    assert has_async_preference(request) is deferred
