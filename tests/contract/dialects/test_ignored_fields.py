"""Ignored fields of a request are named in its answer and in its record, by the fast path and the ASGI application."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from router.settings import RouterSettings
from tests.contract.dialects.test_chat import plain, served
from tests.support.cluster.loopback_cluster import LoopbackCluster, LoopbackNode

HELLO = [{"role": "user", "content": "hello"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "tiny", "messages": HELLO},
    "/v1/completions": {"model": "tiny", "prompt": "x"},
    "/v1/responses": {"model": "tiny", "input": "x"},
    "/v1/messages": {"model": "tiny", "messages": HELLO, "max_tokens": 5},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": HELLO},
    "/api/chat": {"model": "tiny", "messages": HELLO},
    "/api/generate": {"model": "tiny", "prompt": "x"},
}
HEADER = "x-macpool-ignored"


@pytest.fixture(params=[True, False], ids=["front", "app"])
async def cluster(request: pytest.FixtureRequest) -> AsyncIterator[LoopbackCluster]:
    one = LoopbackCluster(LoopbackNode("studio"))
    one.front = request.param  # pyright: ignore[reportAttributeAccessIssue]
    async with served(one):
        yield one


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ROUTES)
async def test_ignored_fields_are_named_in_a_header(cluster: LoopbackCluster, path: str, stream: bool):
    more = {} if path.endswith("count_tokens") else {"stream": stream}
    async with plain(cluster) as client:
        answer = await client.post(path, json=ROUTES[path] | more | {"colour": "red", "evil\r\nx-a": 1})
        usual = await client.post(path, json=ROUTES[path] | more)
    assert (answer.status_code, answer.headers[HEADER]) == (200, "colour, (unprintable)")
    assert "x-a" not in answer.headers
    assert HEADER not in usual.headers


async def test_refusal_names_ignored_fields_and_explain_lists_them(cluster: LoopbackCluster):
    async with plain(cluster) as client:
        answer = await client.post(
            "/v1/chat/completions", json={"model": "none", "messages": HELLO, "tools": [{"type": "web_search"}]}
        )
    assert (answer.status_code, answer.headers[HEADER]) == (404, "tools[0].type=web_search")
    (story,) = cluster.dispatcher.history.find_requests(answer.headers["x-request-id"])
    assert story.ignored == ("tools[0].type=web_search",)


async def test_custom_tool_of_chat_is_not_reported_as_ignored(cluster: LoopbackCluster):
    tools = [{"type": "custom", "custom": {"name": "apply_patch"}}]
    async with plain(cluster) as client:
        answer = await client.post("/v1/chat/completions", json=ROUTES["/v1/chat/completions"] | {"tools": tools})
    assert answer.status_code in (200, 400), answer.text
    assert HEADER not in answer.headers


async def test_strict_setting_refuses_unknown_fields():
    strict = LoopbackCluster(LoopbackNode("studio"), settings=RouterSettings(unknown_fields="refuse"))
    async with served(strict), plain(strict) as client:
        for path, body in ROUTES.items():
            answer: httpx.Response = await client.post(path, json=body | {"colour": "red"})
            assert answer.status_code == 400, path
            tools = await client.post(path, json=body | {"tools": [{"type": "web_search", "name": "x"}]})
            assert tools.status_code == 400, path
            known = await client.post(path, json=body | {"keep_alive": 5})
            assert (known.status_code, known.headers[HEADER]) == (200, "keep_alive")
