"""Every route that a plain key may use, against every limit of a key: it holds, or a reason says why it does not apply.

`TABLE` has a row for each route and a column for each limit. The routes come from the OpenAPI document and the columns
from `KeyLimits`. A new route or limit therefore fails here until it has entries.
"""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from coordinator.video.state import events
from router.admission.rate_limits import KeyLimits
from router.placement.cluster_view import ClusterView
from router.upstreams import UpstreamSettings
from tests.support.cluster import whole_pool
from tests.support.cluster.loopback_cluster import LoopbackNode, a_memory, a_model
from tests.support.cluster.whole_pool import Served, status
from wire.frames import CountTokens, Embed, Generate
from wire.identity import NodeId
from wire.report import Model
from wire.units import GIB
from wire.video import VideoPackage, VideoState

HELD = ""
OWN = "it shows or ends what the key itself has made"
NOTHING = "it answers with a fixed refusal or fact, and reaches no node"
LISTS = "a list of models costs nothing: it reaches no node"
AT_ONCE = "it is answered at once and waits in no queue"
NO_TEXT = "a video has no tokens of text"
STAYS = "no request of this route goes to an upstream"
IN_TURN = "videos are made in the order in which they came"

PASSED_ON = dict.fromkeys(KeyLimits.__struct_fields__, HELD)
GENERATES = PASSED_ON | {"upstreams": STAYS}
SHOWS = {"models": HELD, "labels": HELD} | dict.fromkeys(
    ("requests_per_minute", "tokens_per_minute", "concurrency", "waiting", "priority", "upstreams"), LISTS
)
FIXED = dict.fromkeys(KeyLimits.__struct_fields__, NOTHING)
OWNED = dict.fromkeys(KeyLimits.__struct_fields__, OWN)
TABLE: dict[str, dict[str, str]] = {
    "POST /v1/chat/completions": PASSED_ON,
    "POST /v1/completions": PASSED_ON,
    "POST /v1/messages": GENERATES,
    "POST /v1/responses": GENERATES,
    "POST /api/chat": GENERATES,
    "POST /api/generate": GENERATES,
    "POST /v1/embeddings": GENERATES,
    "POST /api/embed": GENERATES,
    "POST /api/embeddings": GENERATES,
    "POST /v1/rerank": GENERATES,
    "POST /v2/rerank": GENERATES,
    "POST /v1/messages/count_tokens": GENERATES | {"waiting": AT_ONCE, "priority": AT_ONCE},
    "POST /v1/videos": GENERATES | {"tokens_per_minute": NO_TEXT, "priority": IN_TURN},
    "GET /v1/models": SHOWS,
    "GET /v1/models/{model}": SHOWS,
    "GET /api/tags": SHOWS,
    "GET /api/ps": SHOWS,
    "POST /api/show": SHOWS,
    "GET /api/v1/models": SHOWS,
    "GET /api/v1/videos/models": SHOWS,
    "GET /v1/responses/{response}": OWNED,
    "DELETE /v1/responses/{response}": OWNED,
    "GET /v1/videos": OWNED,
    "GET /v1/videos/{video}": OWNED,
    "DELETE /v1/videos/{video}": OWNED,
    "GET /v1/videos/{video}/content": OWNED,
    "POST /v1/videos/{video}/cancel": OWNED,
    "GET /api/v1/usage": OWNED,
    "GET /api/v1/key": OWNED,
    "POST /v1/videos/edits": FIXED,
    "POST /v1/videos/extensions": FIXED,
    "POST /v1/videos/characters": FIXED,
    "GET /v1/videos/characters/{character}": FIXED,
    "POST /v1/videos/{video}/remix": FIXED,
    "GET /api/version": FIXED,
    "GET /api/v1/version": FIXED,
    "POST /api/blobs/{digest}": FIXED,
    "POST /api/copy": FIXED,
    "POST /api/create": FIXED,
    "POST /api/pull": FIXED,
    "POST /api/push": FIXED,
    "DELETE /api/delete": FIXED,
}
"""By route and limit: HELD, or the reason why the limit does not apply."""

HELLO = [{"role": "user", "content": "hello " * 20}]
BODIES: dict[str, dict[str, Any]] = {
    "POST /v1/chat/completions": {"messages": HELLO},
    "POST /v1/completions": {"prompt": "hello " * 20},
    "POST /v1/messages": {"messages": HELLO, "max_tokens": 50},
    "POST /v1/responses": {"input": "hello " * 20},
    "POST /api/chat": {"messages": HELLO, "stream": False},
    "POST /api/generate": {"prompt": "hello " * 20, "stream": False},
    "POST /v1/messages/count_tokens": {"messages": HELLO},
    "POST /v1/embeddings": {"input": "hello " * 20},
    "POST /api/embed": {"input": "hello " * 20},
    "POST /api/embeddings": {"prompt": "hello " * 20},
    "POST /v1/rerank": {"query": "hello", "documents": ["hello " * 20]},
    "POST /v2/rerank": {"query": "hello", "documents": ["hello " * 20]},
    "POST /v1/videos": {"prompt": "a mouse", "size": "256x256", "frames": 5, "steps": 2},
    "POST /api/show": {},
}
TINY, DESK, ATTIC = "tiny", "desk-model", "attic-model"
SECRET = "secret-video"
KINDS = {
    **dict.fromkeys(("POST /v1/embeddings", "POST /api/embed", "POST /api/embeddings"), "embed"),
    **dict.fromkeys(("POST /v1/rerank", "POST /v2/rerank"), "rerank"),
}
"""Kind of the model that a route needs, if it is not a chat."""
OTHERS = (TINY, DESK, ATTIC)
"""Models for chats, on whose nodes are models of the other kinds."""
VIDEOS = "POST /v1/videos"
USES = BODIES.keys() - {"POST /api/show"}
"""Routes that make nodes work."""
NAMES = {"POST /api/show", "GET /v1/models/{model}"}
"""Routes that show the model that a request names."""
VIDEO = VideoState(
    True, "", "ray", tuple(VideoPackage(name, engine="1", bits=8, expert=GIB) for name in ("wan", SECRET))
)


@pytest.fixture(scope="module", params=["front", "asgi"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    """Serve two nodes with different models: `office` has the label, `attic` does not."""
    office = LoopbackNode("office", models=both(TINY, DESK), labels=frozenset({"office"}))
    attic = LoopbackNode("attic", models=both(TINY, ATTIC))
    away = {"away": UpstreamSettings(url="http://127.0.0.1:1/v1", model="far")}
    settings: dict[str, Any] = {"queue_timeout_seconds": 0.4, "upstreams": away}
    settings["aliases"] = {"travel": ("nowhere", "upstream:away")}
    with whole_pool.served(office, attic, front=request.param == "front", **settings) as one:
        one.call(lambda: _show(one))
        yield one


def both(*names: str) -> tuple[Model, ...]:
    """Return models for chats, and for each an embedding model and a reranker."""
    others = (a_model(f"{name}-{kind}", features=(kind,)) for name in names for kind in ("embed", "rerank"))
    return (*map(a_model, names), *others)


def _show(served: Served) -> None:
    """Set the same nodes for the routes of the control plane and of videos."""
    nodes = served.cluster.dispatcher.view.nodes
    view = ClusterView(
        tuple(replace(node, video=VIDEO, video_allowed=True, memory=a_memory(80 * GIB, 128 * GIB)) for node in nodes)
    )
    served.built.registry.build_view = lambda: view
    served.built.conductor.apply_view(view)


@pytest.fixture(autouse=True)
def restored(served: Served) -> Iterator[None]:
    """Restore the nodes, and delete all videos."""
    yield
    for node in served.cluster.nodes.values():
        node.mute, node.memory = False, a_memory()
        node.heard.clear()
    conductor = served.built.conductor
    for job in list(conductor.table.jobs):
        served.call(lambda job=job: conductor.apply_event(events.JobDeleted(job)))
    served.call(served.cluster.report)


def key_with(served: Served, **limits: object) -> str:
    made = served.call(
        lambda: served.built.admin.create_key("k", ["infer"], None, KeyLimits(**limits))  # pyright: ignore
    )
    assert isinstance(made, dict)
    return made["key"]


def raw(operation: str, key: str, model: str = TINY, **more: object) -> bytes:
    method, path = operation.split(" ")
    path = path.replace("{model}", model)
    named = "wan" if operation == VIDEOS and model == TINY else model
    named = f"{model}-{KINDS[operation]}" if operation in KINDS and model in OTHERS else named
    body = json.dumps({"model": named, **BODIES.get(operation, {}), **more}).encode() if method == "POST" else b""
    head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {key}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    return head.encode() + body


def ask(served: Served, operation: str, key: str, model: str = TINY) -> bytes:
    (answer,) = served.ask(raw(operation, key, model))
    return answer


def asked(served: Served, name: str) -> list[Generate | CountTokens | Embed]:
    """Return the Generate, CountTokens and Embed frames that a node received."""
    return [one for one in served.cluster.nodes[NodeId(name)].heard if isinstance(one, Generate | CountTokens | Embed)]


@contextmanager
def under_way(served: Served, key: str) -> Iterator[None]:
    """Keep a stream of this key open during the block."""
    for node in served.cluster.nodes.values():
        node.mute = True
    with socket.create_connection(served.address, timeout=20) as dialed:
        dialed.sendall(raw("POST /v1/chat/completions", key, stream=True))
        deadline = time.monotonic() + 10
        while not (asked(served, "office") or asked(served, "attic")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield


def held(limit: str) -> list[str]:
    return sorted(route for route, row in TABLE.items() if row[limit] == HELD)


def test_every_route_of_a_plain_key_has_its_limits(served: Served):
    described = {
        f"{method.upper()} {path}"
        for path, item in served.document["paths"].items()
        for method, about in item.items()
        if about.get("x-scope") == "infer"
    }
    assert set(TABLE) == described
    for route, row in TABLE.items():
        assert set(row) == set(KeyLimits.__struct_fields__), route


@pytest.mark.parametrize("route", held("models"))
def test_models(served: Served, route: str):
    key = key_with(served, models=(DESK, "wan"))
    if route in USES:
        answer = ask(served, route, key, SECRET if route == VIDEOS else TINY)
        assert (status(answer), b"may not use the model" in answer) == (403, True)
        assert asked(served, "office") + asked(served, "attic") == []
    elif route in NAMES:
        assert status(ask(served, route, key, DESK)) == 200
        assert status(ask(served, route, key, TINY)) == 404
    else:
        answer = ask(served, route, key)
        assert (DESK if "videos" not in route else "wan").encode() in answer
        assert not [name for name in (TINY, ATTIC, SECRET) if f'"{name}"' in answer.decode()]


@pytest.mark.parametrize("route", sorted(USES))
def test_a_wrong_name_is_not_answered_with_one_that_the_key_may_not_use(served: Served, route: str):
    near = (SECRET if route == VIDEOS else ATTIC)[:-1]
    answer = ask(served, route, key_with(served, models=(near,)), near)
    assert status(answer) == 404
    assert SECRET not in answer.decode()
    assert ATTIC not in answer.decode()


@pytest.mark.parametrize("route", held("labels"))
def test_labels(served: Served, route: str):
    """Only the office serves the key, and only its models are listed."""
    key = key_with(served, labels=("office",))
    if route == VIDEOS:
        assert status(ask(served, route, key)) == 200
        (job,) = served.built.conductor.table.jobs.values()
        assert job.wanted.labels == ("office",), "it is placed on nodes with the label alone"
    elif route in USES:
        assert [status(ask(served, route, key)) for _ in range(4)] == [200] * 4
        assert (len(asked(served, "office")), asked(served, "attic")) == (4, [])
        assert status(ask(served, route, key, ATTIC)) == 403
        assert asked(served, "attic") == []
    elif route in NAMES:
        assert [status(ask(served, route, key, name)) for name in (DESK, ATTIC)] == [200, 404]
    else:
        answer = ask(served, route, key).decode()
        assert ("office" if "/api/v1/" in route else DESK) in answer
        assert "attic" not in answer


@pytest.mark.parametrize("route", held("requests_per_minute"))
def test_requests_per_minute(served: Served, route: str):
    key = key_with(served, requests_per_minute=1)
    assert [status(ask(served, route, key)) for _ in range(2)] == [200, 429]


@pytest.mark.parametrize("route", held("tokens_per_minute"))
def test_tokens_per_minute(served: Served, route: str):
    """Send a prompt of thirty tokens after one that has used up the minute's tokens."""
    key = key_with(served, tokens_per_minute=20)
    assert status(ask(served, "POST /v1/chat/completions", key)) == 200
    assert status(ask(served, route, key)) == 429


@pytest.mark.parametrize("route", held("concurrency"))
def test_concurrency(served: Served, route: str):
    key = key_with(served, concurrency=1)
    if route == VIDEOS:
        assert [status(ask(served, route, key)) for _ in range(2)] == [200, 429]
        return
    with under_way(served, key):
        assert status(ask(served, route, key)) == 429


@pytest.mark.parametrize("route", held("waiting"))
def test_waiting(served: Served, route: str):
    key = key_with(served, waiting=0)
    for node in served.cluster.nodes.values():
        node.memory = a_memory(0)
    served.call(served.cluster.report)
    answers_ = [status(ask(served, route, key)) for _ in range(2)]
    assert answers_[-1] == 429, "one video may wait for its node, no request for text may"


@pytest.mark.parametrize("route", held("priority"))
def test_priority(served: Served, route: str):
    assert status(ask(served, route, key_with(served, priority="high"))) == 200
    (frame,) = asked(served, "office") + asked(served, "attic")
    assert isinstance(frame, Generate | Embed)
    assert frame.weighted_key.weight == 16


@pytest.mark.parametrize("route", sorted(USES - {VIDEOS}))
def test_upstreams(served: Served, route: str):
    forbidden = ask(served, route, key_with(served, upstreams=False), "travel")
    assert (status(forbidden), b"upstream_failed" in forbidden) == (404, False)
    allowed = ask(served, route, key_with(served, upstreams=True), "travel")
    assert (b"upstream_failed" in allowed) is (route in held("upstreams")), "nothing listens there"
