"""A server with OpenAI's API in a process of its own, with switches for every fault that an upstream may have.

The fault is the name of the model in the request, such as `status-500`. Requests are kept and returned at `/seen`.
"""

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from tests.support.processes import NO_TLS

WORDS = ("Far ", "away ", "answer")
ROOT = Path(__file__).parents[2]
MIB = 1024 * 1024
_seen: list[dict[str, Any]] = []


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answer one request with the fault that its model names. At `/seen`, answer with all earlier requests."""
    if scope["type"] != "http":
        return
    body = b""
    while True:
        part = await receive()
        body += part.get("body", b"")
        if not part.get("more_body"):
            break
    if scope["path"] == "/seen":
        await _answer(send, 200, json.dumps(_seen).encode())
        return
    asked = json.loads(body)
    headers = {name.decode(): value.decode() for name, value in scope["headers"]}
    _seen.append({"path": scope["path"], "headers": headers, "body": asked})
    fault = asked["model"]
    if fault.startswith("status-"):
        await _answer_status(send, int(fault.removeprefix("status-")), headers.get("authorization", ""))
    elif fault == "silent":
        await asyncio.sleep(60)
    elif fault == "html":
        await _answer(send, 200, b"<html>", b"text/html")
    elif fault == "gzip":
        await _answer(send, 200, b"{}", extra=[(b"content-encoding", b"gzip")])
    elif asked.get("stream"):
        await _stream(send, asked, fault)
    else:
        await _complete(send, fault)


async def _answer(
    send: Any, status: int, body: bytes, kind: bytes = b"application/json", extra: list[Any] | None = None
) -> None:
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode()), *(extra or [])]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _answer_status(send: Any, status: int, key: str) -> None:
    error = {"error": {"message": f"bad\nrequest\x07 with {key}", "type": "x"}}
    extra = {429: [(b"retry-after", b"7")], 302: [(b"location", b"http://127.0.0.1:1/")]}.get(status, [])
    await _answer(send, status, json.dumps(error).encode(), extra=extra)


async def _complete(send: Any, fault: str) -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": "".join(WORDS)}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14}
    answer: Any = {"id": "x", "object": "chat.completion", "created": 1, "model": fault, "choices": [choice]}
    answer |= {} if fault == "uncounted" else {"usage": usage}
    bodies = {
        "not-json": b"{",
        "list": b"[]",
        "no-choices": b"{}",
        "error": b'{"error":{"message":"x"}}',
        "lying-usage": json.dumps({**answer, "usage": {"prompt_tokens": -5, "completion_tokens": "x"}}).encode(),
    }
    await _answer(send, 200, bodies.get(fault, json.dumps(answer).encode()))


async def _stream(send: Any, asked: dict[str, Any], fault: str) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})

    async def event(data: bytes) -> None:
        await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})

    def chunk(delta: dict[str, str], reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        return json.dumps({"id": "x", "object": "chat.completion.chunk", "created": 1, "model": fault,
                           "choices": [choice]}).encode()  # fmt: skip

    if fault == "not-json-first":
        await event(b"{")
    if fault == "comment":
        await send({"type": "http.response.body", "body": b": PROCESSING\r\n\r\n", "more_body": True})
    if fault == "slow-first":
        await asyncio.sleep(60)
    for at, word in enumerate(WORDS):
        await event(chunk({"content": word}))
        if at == 0 and fault == "endless-line":
            for _ in range(4):
                await send({"type": "http.response.body", "body": b"x" * MIB, "more_body": True})
        elif at == 0 and fault in ("not-json", "stream-error"):
            await event(b'{"error":{"message":"x"}}' if fault == "stream-error" else b"{")
        elif at == 0 and fault == "cut":
            raise RuntimeError("the connection is cut")
        elif at == 0 and fault == "ends":
            break
        elif at == 0 and fault == "stalls":
            await asyncio.sleep(60)
    if fault != "ends":
        await event(chunk({}, "stop"))
    if asked.get("stream_options", {}).get("include_usage") and fault != "uncounted":
        usage = {"prompt_tokens": 11, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
        await event(json.dumps({"id": "x", "choices": [], "usage": usage}).encode())
    if fault not in ("ends", "no-done"):
        await event(b"[DONE]")
    await send({"type": "http.response.body", "body": b""})


@contextmanager
def running() -> Iterator[str]:
    """Run the server as a process, and yield its base URL with `/v1`."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.upstream", str(listener.fileno())],
            pass_fds=[listener.fileno()],
            cwd=ROOT,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.kill()
            process.wait()


def read_seen(url: str) -> list[dict[str, Any]]:
    """Return the requests that the server at a base URL has got."""
    return httpx.get(url.removesuffix("/v1") + "/seen", trust_env=False, verify=NO_TLS, timeout=20).json()


if __name__ == "__main__":
    uvicorn.run(app, fd=int(sys.argv[1]), log_level="critical", lifespan="off")
