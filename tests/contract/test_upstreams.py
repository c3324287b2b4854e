"""Upstreams as last candidates of aliases: a real server in a process of its own, and OpenAI's library."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from msgspec.structs import replace

from router.admission.rate_limits import KeyLimits
from router.dispatch.circuit_breaker import MAX_FAULTS, SAME_FAULT_SECONDS
from router.dispatch.counters import UPSTREAM_OUTCOMES
from router.profiles import ProfileSettings
from router.settings import RouterSettings
from router.upstreams import UpstreamSettings
from tests.support import upstream
from tests.support.cluster.asgi_call import Call
from tests.support.cluster.loopback_cluster import LoopbackCluster, LoopbackNode, a_memory, a_model
from tests.support.upstream import WORDS, read_seen
from wire.units import GIB

SECRET = "sk-very-secret-0123456789"
BIG = a_model("big-30b", weights=60 * GIB, loaded=False)
MESSAGES: Any = [{"role": "user", "content": "hello"}]
TEXT = "".join(WORDS)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with upstream.running() as url:
        yield url


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "key"
    file.write_text(SECRET + "\n")
    file.chmod(0o600)
    return file


@contextlib.asynccontextmanager
async def served(url: str, key_file: Path | str, model: str = "far", **more: Any) -> AsyncIterator[LoopbackCluster]:
    options: dict[str, Any] = {"idle_seconds": 2.0, "total_seconds": 20.0, "connect_seconds": 2.0}
    default = more.pop("upstreams_by_default", True)
    slow_seconds = more.pop("slow_client_seconds", 60.0)
    settings = RouterSettings(
        aliases={"coder": ("big-30b", "upstream:home")},
        profiles={
            "calm": ProfileSettings(temperature=0.1, top_p=0.5, max_tokens=9),
            "brief": ProfileSettings(chat_template_kwargs={"enable_thinking": False}),
        },
        upstreams={"home": UpstreamSettings(url=url, model=model, key_file=str(key_file), **(options | more))},
        upstreams_by_default=default,
        slow_client_seconds=slow_seconds,
    )
    cluster = LoopbackCluster(LoopbackNode("studio", a_memory(), (BIG,)), settings=settings)
    async with cluster.serving() as base:
        cluster.base_url = base
        yield cluster
    assert cluster.dispatcher.idle
    assert cluster.dispatcher.quotas.count_open("test") == 0


def library(cluster: LoopbackCluster) -> openai.AsyncOpenAI:
    client = openai.DefaultAsyncHttpxClient(trust_env=False, timeout=60)
    return openai.AsyncOpenAI(base_url=cluster.base_url + "/v1", api_key=cluster.key, max_retries=0, http_client=client)


def plain(cluster: LoopbackCluster) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {cluster.key}"}
    return httpx.AsyncClient(base_url=cluster.base_url, headers=headers, trust_env=False, timeout=60)


def counts(cluster: LoopbackCluster) -> dict[str, int]:
    found = cluster.dispatcher.counters.upstreams["home"].outcomes
    assert set(found) <= set(UPSTREAM_OUTCOMES)
    return found


async def test_half_of_an_emoji_is_replaced_on_the_way(server: str, key_file: Path):
    body = rb'{"model":"coder","seed":7,"messages":[{"role":"user","content":"a\ud83d"}]}'
    async with served(server, key_file) as cluster, plain(cluster) as client:
        assert (await client.post("/v1/chat/completions", content=body)).status_code == 200
    messages = [{"role": "user", "content": "a\ufffd"}]
    assert read_seen(server)[-1]["body"] == {"model": "far", "messages": messages, "seed": 7}


async def test_the_upstream_answers_while_no_model_can_start(server: str, key_file: Path):
    async with served(server, key_file) as cluster, library(cluster) as client:
        raw = await client.chat.completions.with_raw_response.create(
            model="coder", messages=MESSAGES, temperature=0.7, extra_headers={"x-request-id": "mine", "x-private": "p"}
        )
        answer = raw.parse()
        assert (answer.model, answer.choices[0].message.content) == ("upstream:home/far", TEXT)
        assert raw.headers["x-macpool-upstream"] == "home"
        assert raw.headers["x-macpool-model"] == "upstream:home/far"
        assert "x-macpool-node" not in raw.headers
        (record,) = cluster.dispatcher.history.find_requests("mine")
        assert (record.alias, record.model, record.outcome) == ("coder", "upstream:home/far", "ok")
        assert [one.model for one in record.passed_over] == ["big-30b"]
        assert record.steps[-1][1] == "passed on to upstream:home/far"
        assert (record.prompt_tokens, record.completion_tokens) == (11, 3)
        ((_, model), usage) = next(iter(cluster.dispatcher.usage.drain().items()))
        assert (model, usage.prompt_tokens, usage.completion_tokens) == ("upstream:home/far", 11, 3)
        assert counts(cluster) == {"ok": 1}
    seen = read_seen(server)[-1]
    assert seen["path"] == "/v1/chat/completions"
    assert seen["body"] == {"model": "far", "messages": MESSAGES, "temperature": 0.7}
    assert seen["headers"]["authorization"] == f"Bearer {SECRET}"
    assert "x-private" not in seen["headers"]
    assert "x-request-id" not in seen["headers"]


async def test_a_stream_is_passed_through_event_by_event(server: str, key_file: Path):
    async with served(server, key_file) as cluster, library(cluster) as client:
        stream = await client.chat.completions.create(model="coder", messages=MESSAGES, stream=True)
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
        assert {chunk.model for chunk in chunks} == {"upstream:home/far"}
        usage = {"include_usage": True}
        counted = await client.chat.completions.create(
            model="coder",
            messages=MESSAGES,
            stream=True,
            stream_options=usage,  # pyright: ignore
        )
        *_, last = [chunk async for chunk in counted]
        assert last.usage is not None
        assert (last.choices, last.usage.completion_tokens) == ([], 3)
        totals = cluster.dispatcher.counters.upstreams["home"]
        assert (totals.prompt_tokens, totals.completion_tokens) == (22, 6)
        (used,) = cluster.dispatcher.usage.drain().values()
        assert (used.prompt_tokens, used.cached_tokens, used.completion_tokens) == (22, 8, 6)


async def test_upstream_completions_use_their_path_and_profile(server: str, key_file: Path):
    async with served(server, key_file) as cluster, library(cluster) as client:
        done = await client.completions.create(model="coder:calm", prompt="hello", top_p=1)
        assert done.model == "upstream:home/far"
    seen = read_seen(server)[-1]
    assert seen["path"] == "/v1/completions"
    assert seen["body"] == {"model": "far", "prompt": "hello", "top_p": 1, "temperature": 0.1, "max_tokens": 9}


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_an_upstream_gets_the_token_limit_of_the_client_in_place_of_the_profiles(
    server: str, key_file: Path, field: str
):
    async with served(server, key_file) as cluster, plain(cluster) as client:
        body: dict[str, Any] = {"model": "coder:calm", "messages": MESSAGES, field: 7}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    sent = read_seen(server)[-1]["body"]
    assert {name: value for name, value in sent.items() if name.startswith("max_")} == {field: 7}


async def test_template_variables_of_a_client_precede_those_of_its_profile(server: str, key_file: Path):
    body: dict[str, Any] = {"model": "coder:brief", "messages": MESSAGES}
    async with served(server, key_file) as cluster, plain(cluster) as client:
        for own, sent in (({"enable_thinking": True}, True), ({}, False)):
            answer = await client.post("/v1/chat/completions", json=body | {"chat_template_kwargs": own})
            assert answer.status_code == 200
            assert read_seen(server)[-1]["body"]["chat_template_kwargs"] == {"enable_thinking": sent}


async def test_a_null_of_a_client_is_no_value_in_place_of_the_profiles(server: str, key_file: Path):
    body: dict[str, Any] = {"model": "coder:calm", "messages": MESSAGES, "temperature": None, "max_tokens": None}
    async with served(server, key_file) as cluster, plain(cluster) as client:
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    sent = read_seen(server)[-1]["body"]
    assert (sent["temperature"], sent["max_tokens"]) == (0.1, 9)


async def test_a_model_that_fits_is_never_skipped(server: str, key_file: Path):
    async with served(server, key_file) as cluster, library(cluster) as client:
        cluster.nodes["studio"].memory = a_memory(80 * GIB, 96 * GIB)  # pyright: ignore
        cluster.report()
        answer = await client.chat.completions.create(model="coder", messages=MESSAGES)
        assert answer.model == "big-30b"
        assert cluster.dispatcher.counters.upstreams == {}


async def test_a_request_that_a_node_refuses_is_retried(server: str, key_file: Path):
    async with served(server, key_file) as cluster, library(cluster) as client:
        node = cluster.nodes["studio"]  # pyright: ignore
        node.memory, node.refuse = a_memory(80 * GIB, 96 * GIB), 1
        cluster.report()
        answer = await client.chat.completions.create(model="coder", messages=MESSAGES)
        assert answer.model == "upstream:home/far"
        stream = await client.chat.completions.create(model="big-30b", messages=MESSAGES, stream=True)
        assert {chunk.model async for chunk in stream} == {"big-30b"}


@pytest.mark.parametrize(
    ("limits", "default"),
    [
        (KeyLimits(upstreams=False), True),
        (KeyLimits(models=("coder",)), True),
        (KeyLimits(labels=("lab",)), True),
        (KeyLimits(), False),
    ],
)
async def test_prompt_of_a_key_without_upstreams_is_not_sent_to_an_upstream(
    server: str, key_file: Path, limits: KeyLimits, default: bool
):
    before = len(read_seen(server))
    async with served(server, key_file, upstreams_by_default=default) as cluster, library(cluster) as client:
        cluster.nodes["studio"].models = (a_model("other"),)  # pyright: ignore
        cluster.report()
        cluster.limits = lambda _: limits
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(model="coder", messages=MESSAGES)
        assert "upstream:home: this API key may not send prompts to upstreams" in str(caught.value) or limits.models
        cluster.limits = lambda _: KeyLimits(models=limits.models, labels=limits.labels, upstreams=True)
        answer = await client.chat.completions.create(model="coder", messages=MESSAGES)
        assert answer.model == "upstream:home/far"
    assert len(read_seen(server)) == before + 1


async def test_a_key_that_may_use_a_model_of_an_alias_but_not_the_alias_gets_no_upstream(server: str, key_file: Path):
    before = len(read_seen(server))
    async with served(server, key_file) as cluster, library(cluster) as client:
        cluster.limits = lambda _: KeyLimits(models=("big-30b",), upstreams=True)
        with pytest.raises(openai.APIStatusError):
            await client.chat.completions.create(model="coder", messages=MESSAGES)
    assert len(read_seen(server)) == before


async def test_other_dialects_of_an_upstream_get_the_local_refusal(server: str, key_file: Path):
    before = len(read_seen(server))
    async with served(server, key_file) as cluster, plain(cluster) as client:
        cluster.nodes["studio"].models = (a_model("other"),)  # pyright: ignore
        cluster.report()
        bodies = {
            "/v1/responses": {"model": "coder", "input": "hello"},
            "/v1/messages": {"model": "coder", "messages": MESSAGES, "max_tokens": 9},
            "/api/chat": {"model": "coder", "messages": MESSAGES, "stream": False},
            "/v1/completions": {"model": "coder", "prompt": ["a", "b"]},
        }
        for path, body in bodies.items():
            answer = await client.post(path, json=body)
            assert answer.status_code == 404, path
            assert "big-30b: no node serves big-30b; upstream:home: it takes only chat completions" in answer.text, path
    assert len(read_seen(server)) == before


FAULTS = [
    ("status-500", 502, "the upstream home answered 500; no candidate of coder can start now: big-30b: needs"),
    ("status-401", 502, "the upstream home answered 401: it refuses the key in its key_file"),
    ("status-403", 502, "the upstream home answered 403: it refuses the key in its key_file"),
    ("status-429", 503, "the upstream home answered 429: it takes no more requests now"),
    ("status-302", 502, "the upstream home answered 302: redirects are not followed"),
    ("status-400", 400, "the upstream home answered 400: bad request with Bearer (key)"),
    ("html", 502, "the upstream home answered with text/html, not "),
    ("gzip", 502, "the upstream home "),
]
STREAM_FAULTS = [
    ("silent", 502, "the upstream home sent nothing for 2 s"),
    ("not-json-first", 502, "the upstream home sent text that is not JSON"),
    ("slow-first", 502, "the upstream home sent nothing for 2 s"),
]
WHOLE_FAULTS = [
    ("silent", 502, "the upstream home did not end within 3 s"),
    ("not-json", 502, "the upstream home sent text that is not JSON"),
    ("list", 502, "the upstream home sent JSON that is not an object"),
    ("no-choices", 502, "the upstream home sent an answer without choices"),
    ("error", 502, "the upstream home sent an error in place of an answer"),
]


@pytest.mark.parametrize(
    ("fault", "status", "sentence", "stream"),
    [
        *((*fault, stream) for fault in FAULTS for stream in (False, True)),
        *((*fault, True) for fault in STREAM_FAULTS),
        *((*fault, False) for fault in WHOLE_FAULTS),
    ],
)
async def test_a_failure_before_the_first_byte_is_one_error(
    server: str, key_file: Path, fault: str, status: int, sentence: str, stream: bool, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("DEBUG")
    async with served(server, key_file, fault, total_seconds=3.0 if fault == "silent" else 20.0) as cluster:
        async with plain(cluster) as client:
            body = {"model": "coder", "messages": MESSAGES, "stream": stream}
            answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert (error["code"], sentence in error["message"]) == ("upstream_failed", True), error["message"]
        assert "no candidate of coder can start now: big-30b: needs" in error["message"]
        assert error["memory"]["ceiling"] == 24 * GIB, "the numbers of the local refusal"
        assert answer.headers["x-macpool-upstream"] == "home"
        assert answer.headers.get("retry-after") == ("7" if fault == "status-429" else None)
        assert SECRET not in answer.text
        (record,) = cluster.dispatcher.history.records
        assert (record.outcome, SECRET in record.message) == ("upstream_failed", False)
        wanted = {"status-429": "limited", "status-400": "refused"}.get(fault, "failed")
        assert counts(cluster) == {wanted: 1}
    assert SECRET not in caplog.text


async def test_the_reason_of_an_upstream_without_a_key_is_passed_on(server: str):
    async with served(server, "", "status-400") as cluster, plain(cluster) as client:
        answer = await client.post("/v1/chat/completions", json={"model": "coder", "messages": MESSAGES})
        assert "the upstream home answered 400: bad request with;" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("not-json", "sent text that is not JSON"),
        ("stream-error", "sent an error in place of an answer"),
        ("cut", "broke the connection"),
        ("ends", "ended its stream in the middle of the answer"),
        ("stalls", "sent nothing for 2 s"),
        ("endless-line", "sent an event of more than 1048576 bytes"),
    ],
)
async def test_a_failure_after_the_first_byte_is_an_error_event(server: str, key_file: Path, fault: str, sentence: str):
    async with served(server, key_file, fault) as cluster, plain(cluster) as client:
        answer = await client.post(
            "/v1/chat/completions", json={"model": "coder", "messages": MESSAGES, "stream": True}
        )
        assert answer.status_code == 200
        events = [line[6:] for line in answer.text.split("\n\n") if line.startswith("data: ")]
        assert json.loads(events[0])["choices"][0]["delta"]["content"] == WORDS[0]
        assert sentence in json.loads(events[-1])["error"]["message"]
        assert counts(cluster) == {"interrupted": 1}
        (record,) = cluster.dispatcher.history.records
        assert record.completion_tokens == 1


async def test_comments_and_a_stream_without_its_last_event_are_tolerated(server: str, key_file: Path):
    for model in ("comment", "no-done", "uncounted"):
        async with served(server, key_file, model) as cluster, plain(cluster) as client:
            body = {"model": "coder", "messages": MESSAGES, "stream": True}
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.text.endswith("data: [DONE]\n\n"), model
            assert (": waiting" in answer.text) is (model == "comment")
            (record,) = cluster.dispatcher.history.records
            assert record.outcome == "ok"
            assert record.completion_tokens == (4 if model == "uncounted" else 3), "counted by its events"


async def test_false_token_counts_are_not_used(server: str, key_file: Path):
    async with served(server, key_file, "lying-usage") as cluster, library(cluster) as client:
        await client.chat.completions.create(model="coder", messages=MESSAGES)
        (record,) = cluster.dispatcher.history.records
        assert record.prompt_tokens is not None
        assert 0 <= record.prompt_tokens < 100
        assert 0 < record.completion_tokens < 200


async def test_failing_upstream_is_paused(key_file: Path):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/v1"
        async with served(url, key_file) as cluster, plain(cluster) as client:
            body = {"model": "coder", "messages": MESSAGES}
            for _ in range(3):
                answer = await client.post("/v1/chat/completions", json=body)
                assert "the upstream home cannot be reached" in answer.text
                await asyncio.sleep(1.01)
            cluster.nodes["studio"].models = (a_model("other"),)  # pyright: ignore
            cluster.report()
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 404
            assert "upstream:home: not asked after failures in a row, the last one: the upstream home" in answer.text
            assert counts(cluster) == {"failed": 3}


async def test_requests_that_an_upstream_refuses_for_their_faults_pause_it_for_nobody(server: str, key_file: Path):
    async with served(server, key_file, "status-400") as cluster, plain(cluster) as client:
        for _ in range(4):
            answer = await client.post("/v1/chat/completions", json={"model": "coder", "messages": MESSAGES})
            assert "the upstream home answered 400" in answer.text
            await asyncio.sleep(1.01)  # faults within a second count as one
        assert counts(cluster) == {"refused": 4}


async def test_requests_above_the_number_of_connections_do_not_pause_an_upstream(
    server: str, key_file: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("router.http.upstream.client.MAX_CONNECTIONS", 1)
    monkeypatch.setattr("router.dispatch.circuit_breaker.MAX_FAULTS", 1)
    async with served(server, key_file, "stalls", idle_seconds=30.0) as cluster, plain(cluster) as client:
        body = {"model": "coder", "messages": MESSAGES, "stream": True}
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            parts = answer.aiter_bytes()  # kept, because its end ends the request
            await anext(parts)
            home = cluster.clients["home"]
            home.settings = replace(home.settings, connect_seconds=0.1)  # the only connection exists already
            refused = await client.post("/v1/chat/completions", json=body)
        assert (refused.status_code, refused.headers.get("retry-after")) == (503, "1"), refused.text
        assert "the upstream home already has 1 requests of this pool" in refused.json()["error"]["message"]
        assert cluster.dispatcher.upstreams.find_obstacle("home") == ""
        await cluster.dispatcher.drain(10)


async def test_a_client_that_leaves_ends_the_request_of_the_upstream(server: str, key_file: Path):
    async with served(server, key_file, "stalls", idle_seconds=30.0) as cluster, plain(cluster) as client:
        body = {"model": "coder", "messages": MESSAGES, "stream": True}
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            await anext(answer.aiter_bytes())
            (request,) = cluster.dispatcher.list_open_requests()
            assert request.state == "upstream"
        async with asyncio.timeout(10):
            await cluster.dispatcher.drain(10)
        await asyncio.sleep(0.05)
        assert counts(cluster) == {"cancelled": 1}
        (record,) = cluster.dispatcher.history.records
        assert (record.outcome, record.completion_tokens) == ("cancelled", 1)


async def test_a_stop_of_the_coordinator_ends_the_stream_with_an_event(server: str, key_file: Path):
    async with served(server, key_file, "stalls", idle_seconds=30.0) as cluster, plain(cluster) as client:
        body = {"model": "coder", "messages": MESSAGES, "stream": True}
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            cluster.dispatcher.shutdown()
            rest = [line async for line in lines if line]
        assert json.loads(rest[-1][6:])["error"]["code"] == "shutting_down"


async def test_the_limits_of_a_key_hold_for_upstreams(server: str, key_file: Path):
    async with served(server, key_file) as cluster, library(cluster) as client:
        cluster.limits = lambda _: KeyLimits(requests_per_minute=1)
        await client.chat.completions.create(model="coder", messages=MESSAGES)
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(model="coder", messages=MESSAGES)


async def test_proxies_of_the_environment_are_not_used(server: str, key_file: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with served(server, key_file) as cluster, library(cluster) as client:
        assert (await client.chat.completions.create(model="coder", messages=MESSAGES)).model == "upstream:home/far"


async def test_faults_of_requests_do_not_pause_the_upstream(server: str, key_file: Path):
    async with served(server, key_file, "status-400") as cluster, plain(cluster) as client:
        cluster.nodes["studio"].models = (a_model("other"),)  # pyright: ignore
        cluster.report()
        body = {"model": "coder", "messages": MESSAGES}
        for _ in range(MAX_FAULTS + 1):
            answer = await client.post("/v1/chat/completions", json=body)
            assert "the upstream home answered 400: bad request" in answer.text
            await asyncio.sleep(SAME_FAULT_SECONDS + 0.01)
        assert counts(cluster) == {"refused": MAX_FAULTS + 1}


@pytest.mark.parametrize("stream", [False, True])
async def test_an_uncounted_answer_is_counted_by_its_size(server: str, key_file: Path, stream: bool):
    async with served(server, key_file, "uncounted") as cluster, plain(cluster) as client:
        messages = [{"role": "user", "content": "x" * 4000}]
        body = {"model": "coder", "messages": messages, "stream": stream}
        answer = await client.post("/v1/chat/completions", json=body)
        (record,) = cluster.dispatcher.history.records
        assert record.prompt_tokens is not None
        assert 1000 <= record.prompt_tokens < 1050, "a token has 4 bytes"
        if stream:
            assert record.completion_tokens == 4
        else:
            assert record.completion_tokens == pytest.approx(len(answer.content) / 4, abs=10)
        totals = cluster.dispatcher.counters.upstreams["home"]
        assert (totals.prompt_tokens, totals.completion_tokens) == (record.prompt_tokens, record.completion_tokens)


async def test_token_ids_of_a_prompt_are_counted_as_they_are(server: str, key_file: Path):
    async with served(server, key_file, "uncounted") as cluster, plain(cluster) as client:
        answer = await client.post("/v1/completions", json={"model": "coder", "prompt": list(range(1, 401))})
        assert answer.status_code == 200, answer.text
        (record,) = cluster.dispatcher.history.records
        assert record.prompt_tokens == 400


async def test_tokens_of_a_failed_answer_are_counted_after_its_first_byte(server: str, key_file: Path):
    body = {"model": "coder", "messages": [{"role": "user", "content": "x" * 4000}], "stream": True}
    for fault, completion in (("status-500", 0), ("not-json", 1)):
        async with served(server, key_file, fault) as cluster, plain(cluster) as client:
            await client.post("/v1/chat/completions", json=body)
            totals = cluster.dispatcher.counters.upstreams["home"]
            assert totals.completion_tokens == completion, fault
            assert (1000 <= totals.prompt_tokens < 1050) if completion else totals.prompt_tokens == 0, fault


async def test_a_stream_that_ends_before_its_first_event_is_one_error(key_file: Path):
    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split()[0]))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + b'data: {"choices"')
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(cut, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        async with served(url, key_file) as cluster, plain(cluster) as client:
            body = {"model": "coder", "messages": MESSAGES, "stream": True}
            answer = await client.post("/v1/chat/completions", json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_failed")
            assert "ended its stream in the middle of the answer" in answer.text
            assert counts(cluster) == {"failed": 1}


def event(delta: dict[str, str], reason: str | None = None) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}).encode() + EOE


EOE = b"\n\n"
WORD, END = event({"content": "Far"}), event({}, "stop") + b"data: [DONE]" + EOE
STREAM: Any = {"model": "coder", "messages": MESSAGES, "stream": True}


class Fixed:
    """Upstream that answers each request with the same events, sent in one write. Without `ends`, no answer ends."""

    def __init__(self, events: bytes, *, kind: bytes = b"text/event-stream", ends: bool = True) -> None:
        self._answer = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ntransfer-encoding: chunked\r\n\r\n" % kind
        self._answer += b"%x\r\n%s\r\n" % (len(events), events) + (b"0\r\n\r\n" if ends else b"")
        self._writer: asyncio.StreamWriter | None = None
        self.connections = 0
        self.bodies: list[bytes] = []
        self.left = asyncio.Event()
        """Set at the end of a connection."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writer = writer
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                self.bodies.append(await reader.readexactly(int(head.partition("content-length: ")[2].split()[0])))
                writer.write(self._answer)
        self.left.set()
        writer.close()

    def finish(self, events: bytes) -> None:
        """Send the last events of an answer that has not ended."""
        assert self._writer is not None
        self._writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(events), events))

    @contextlib.asynccontextmanager
    async def served(self, **settings: Any) -> AsyncIterator[LoopbackCluster]:
        """Yield a cluster whose last candidate is this upstream."""
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        try:
            async with served(url, "", **settings) as cluster, asyncio.timeout(20):
                yield cluster
        finally:
            server.close()


async def test_a_chunk_that_arrives_together_with_an_error_is_passed_on():
    async with Fixed(WORD + b'data: {"error":{"message":"x"}}' + EOE).served() as cluster:
        call = await Call(cluster, STREAM).run()
        word, problem, _ = call.body.split(EOE)
        assert json.loads(word[6:])["choices"][0]["delta"] == {"content": "Far"}
        assert "sent an error in place of an answer" in json.loads(problem[6:])["error"]["message"]
        assert counts(cluster) == {"interrupted": 1}


async def test_a_comment_that_arrives_together_with_an_error_begins_no_stream():
    async with Fixed(b": wait" + EOE + b'data: {"error":{"message":"x"}}' + EOE).served() as cluster:
        call = await Call(cluster, STREAM).run()
        assert (call.status, call.error["code"], counts(cluster)) == (502, "upstream_failed", {"failed": 1})


async def test_token_counts_before_the_last_chunk_are_kept():
    counted = event({"content": "Far"}).replace(
        b'"choices"', b'"usage":{"prompt_tokens":7,"completion_tokens":5},"choices"'
    )
    async with Fixed(counted + END).served() as cluster:
        assert (await Call(cluster, STREAM).run()).status == 200
        totals = cluster.dispatcher.counters.upstreams["home"]
        assert (totals.prompt_tokens, totals.completion_tokens) == (7, 5)


async def test_an_answer_has_at_most_the_allowed_bytes(monkeypatch: pytest.MonkeyPatch):
    answer = b'{"choices": [{"index": 0, "message": {"role": "assistant", "content": "Far"}}]}'
    body = {**STREAM, "stream": False}
    for limit, status, outcome in ((len(answer), 200, "ok"), (len(answer) - 1, 502, "failed")):
        monkeypatch.setattr("router.http.upstream.forward.MAX_ANSWER_BYTES", limit)
        async with Fixed(answer, kind=b"application/json").served() as cluster:
            call = await Call(cluster, body).run()
            assert (call.status, counts(cluster)) == (status, {outcome: 1})
            assert status == 200 or call.error["message"].startswith(
                f"the upstream home sent an answer of more than {limit} bytes"
            )


async def test_a_cancelled_call_ends_its_connection_to_the_upstream():
    upstream = Fixed(WORD, ends=False)
    async with upstream.served(idle_seconds=60.0, total_seconds=60.0) as cluster:
        call = Call(cluster, STREAM)
        running = asyncio.create_task(call.run())
        await call.begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await upstream.left.wait()


async def test_a_connection_is_used_again_after_a_stream():
    upstream = Fixed(WORD + END)
    async with upstream.served() as cluster:
        for _ in range(2):
            assert (await Call(cluster, STREAM).run()).body.endswith(b"data: [DONE]" + EOE)
    assert (len(upstream.bodies), upstream.connections) == (2, 1)


async def test_a_stream_is_complete_at_its_last_event(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("router.http.upstream.client.REST_SECONDS", 0.01)
    async with Fixed(WORD + END, ends=False).served(idle_seconds=30.0) as cluster:
        assert (await Call(cluster, STREAM).run()).body.endswith(b"data: [DONE]" + EOE)
        assert counts(cluster) == {"ok": 1}


async def test_a_client_that_does_not_read_is_no_fault_of_its_upstream(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("router.dispatch.circuit_breaker.MAX_FAULTS", 1)
    async with Fixed(WORD + END).served(slow_client_seconds=0.05, total_seconds=2.0) as cluster:
        call = Call(cluster, STREAM)
        call.reading.clear()
        await call.run()
        assert (counts(cluster), cluster.dispatcher.counters.slow_clients) == ({"cancelled": 1}, 1)
        (record,) = cluster.dispatcher.history.records
        assert (record.outcome, record.completion_tokens) == ("slow_client", 2)
        assert cluster.dispatcher.upstreams.find_obstacle("home") == ""


async def test_time_of_a_slow_reader_is_not_time_of_the_upstream():
    upstream = Fixed(WORD, ends=False)
    whole = Fixed(b'{"choices": [{"index": 0}]}', kind=b"application/json")
    async with upstream.served(total_seconds=1.0) as cluster, whole.served(total_seconds=1.0) as other:
        call, plain_call = Call(cluster, STREAM), Call(other, {**STREAM, "stream": False})
        call.reading.clear()
        plain_call.reading.clear()

        def read() -> None:
            call.reading.set()
            plain_call.reading.set()
            upstream.finish(END)

        asyncio.get_running_loop().call_later(1.2, read)
        await asyncio.gather(call.run(), plain_call.run())
        assert call.body.endswith(b"data: [DONE]" + EOE)
        assert json.loads(plain_call.body)["choices"] == [{"index": 0}]
        assert counts(cluster) == counts(other) == {"ok": 1}


async def test_token_counts_are_requested_only_from_an_upstream_that_knows_the_field():
    upstream = Fixed(WORD + END)
    written = b'{"model":"coder","messages":[{"role":"user","content":"hi"}],"stream":true}'
    async with upstream.served(stream_usage=False) as cluster:
        assert (await Call(cluster, written).run()).status == 200
    assert upstream.bodies == [written.replace(b'"coder"', b'"far"')]


async def test_fields_of_a_client_are_passed_on_as_they_are_written():
    upstream = Fixed(WORD + END)
    own = b'"own":[1e999,-0.0,1E2],"stream_options":{"x":1E2}}'
    written = b'{"model":"coder","messages":[{"role":"user","content":"hi"}],"stream":true,' + own
    async with upstream.served() as cluster:
        assert (await Call(cluster, written).run()).status == 200
    counted = own.replace(b"1E2}}", b'1E2,"include_usage":true}}')
    assert upstream.bodies == [written.replace(b'"coder"', b'"far"').replace(own, counted)]
