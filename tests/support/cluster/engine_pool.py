"""Pools whose nodes run real MLX engines: folders of tiny models, clients, and the counts of the API.

One model under several names stands for several models, because models are loaded, blamed and quarantined by name.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
from openai import DefaultHttpxClient, OpenAI

from tests.models import EMBEDDED
from tests.support.processes import NO_TLS, Pool, until

MLX = (
    "engine.kind=mlx",
    "models.use_huggingface_cache=false",
    "models.profile=off",
    "models.trial=false",
    "node.report_busy_seconds=0.1",
    "node.report_idle_seconds=0.2",
)
"""Settings of a node with short report intervals."""
HELLO = "Hello!"
GREETING = "Hello! I am macpool-tiny, a very small model."
"""The answer of every trained model to HELLO."""


def link(folder: Path, **models: Path) -> Path:
    """Return a folder with a symbolic link to each of these models, under its name."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, place in models.items():
        (folder / name).symlink_to(place)
    return folder


def spoiled(folder: Path, name: str, spoil: Callable[[Path], object]) -> None:
    """Copy the embedded model into a folder, and damage the copy."""
    copy = folder / name
    shutil.copytree(EMBEDDED, copy)
    spoil(copy)


def api(made: Pool, seconds: float = 100.0) -> OpenAI:
    """Return a client without retries that waits `seconds` for an answer."""
    direct = DefaultHttpxClient(trust_env=False, verify=NO_TLS, timeout=seconds)
    return OpenAI(base_url=made.facts["base_url"], api_key=made.key, max_retries=0, http_client=direct)


def said(content: str, system: str = "") -> Any:
    """Return the messages of one question."""
    opening = [{"role": "system", "content": system}] if system else []
    return [*opening, {"role": "user", "content": content}]


def greets(client: OpenAI, model: str) -> bool:
    """Ask a question that the model was trained on, and return whether the answer is verbatim."""
    answer = client.chat.completions.create(model=model, messages=said(HELLO))
    return answer.choices[0].message.content == GREETING


def loaded(made: Pool, node: str) -> set[str]:
    """Return the names of a node's loaded models."""
    return {model["name"] for model in made.node(node).get("models", []) if model["loaded"]}


def counts(made: Pool, node: str) -> dict[str, int]:
    """Return the counts of a node's engine since its start."""
    return made.node(node)["engine"]["counts"]


def at_rest(made: Pool, node: str) -> bool:
    """Return whether a node's engine has no requests and no reserved memory."""
    now = made.node(node)
    return not (now["running"] or now["waiting"] or now["reserved"] or now["in_flight"])


def forwards_of_one(made: Pool, client: OpenAI, node: str, model: str) -> tuple[int, int]:
    """Send a small question to an idle node, the only one with this model; return its forwards before and after.

    The count after the question has all forwards until then, because reports arrive in order.
    """
    until(lambda: at_rest(made, node), what=f"{node} at rest")
    before = counts(made, node)
    client.chat.completions.create(model=model, messages=said(HELLO))
    until(lambda: counts(made, node)["forwards"] >= before["forwards"] + 2, what="the forwards of a small prompt")
    until(lambda: at_rest(made, node), what=f"{node} at rest")
    return before["forwards"], counts(made, node)["forwards"]


def engine_of(made: Pool, node: str) -> psutil.Process:
    """Return the engine process of a node."""
    return made.nodes[node].engine


def order(made: Pool, path: str) -> None:
    """POST to the API with the admin key, which is faster than the command."""
    headers = {"Authorization": f"Bearer {made.secret}"}
    httpx.post(made.base + path, headers=headers, trust_env=False, verify=NO_TLS, timeout=10).raise_for_status()


@contextmanager
def cordoned(made: Pool, node: str) -> Iterator[None]:
    """Cordon a node for the time of the block."""
    order(made, f"/api/v1/nodes/{node}/cordon")
    try:
        yield
    finally:
        order(made, f"/api/v1/nodes/{node}/uncordon")


def leave(made: Pool, model: str, prompt: str, when: Callable[[], object]) -> None:
    """Start a stream and close the connection as soon as `when` returns."""
    body = {"model": model, "messages": said(prompt), "stream": True, "max_tokens": 2000}
    url = urlsplit(made.facts["base_url"])
    connection = HTTPConnection(url.hostname or "", url.port, timeout=30)
    headers = {"Authorization": f"Bearer {made.key}", "Content-Type": "application/json"}
    connection.request("POST", f"{url.path}/chat/completions", json.dumps(body), headers)
    try:
        when()
    finally:
        connection.close()


@contextmanager
def side_by_side(count: int) -> Iterator[Callable[..., Future[Any]]]:
    """Yield a function that starts a call in a thread."""
    with ThreadPoolExecutor(count) as threads:
        yield threads.submit
