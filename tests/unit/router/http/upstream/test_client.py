"""Key files of upstreams, and the clients that use them."""

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from router.http.upstream.client import (
    MAX_CONNECTIONS,
    MAX_ERROR_BYTES,
    MAX_KEY_BYTES,
    KeyFileError,
    UpstreamClient,
    UpstreamError,
    create_clients,
    create_tls_context,
    read_key_file,
)
from router.upstreams import UpstreamSettings


def write(folder: Path, text: str, mode: int = 0o600) -> Path:
    file = folder / "key"
    file.write_text(text)
    file.chmod(mode)
    return file


def test_a_key_is_read_from_a_private_file(tmp_path: Path):
    assert read_key_file(write(tmp_path, " sk-1\n")) == "sk-1"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_read_key_file_refuses_a_file_of_other_users(tmp_path: Path, mode: int):
    file = write(tmp_path, "sk-1", mode)
    with pytest.raises(KeyFileError, match=r"other users may read .*: run `chmod 600 "):
        read_key_file(file)


@pytest.mark.parametrize("key", ["!", "~", "x" * MAX_KEY_BYTES])
def test_a_key_may_have_any_printable_character_and_the_maximum_length(tmp_path: Path, key: str):
    assert read_key_file(write(tmp_path, f"{key}\n")) == key


@pytest.mark.parametrize("text", ["", "\n", "two words", "a\nb", "ü", "a\x7f", "x" * (MAX_KEY_BYTES + 1), "x" * 5000])
def test_a_file_without_a_key_is_refused(tmp_path: Path, text: str):
    with pytest.raises(KeyFileError, match="does not have an API key on one line"):
        read_key_file(write(tmp_path, text))


def test_read_key_file_refuses_missing_files_pipes_and_links(tmp_path: Path):
    with pytest.raises(KeyFileError, match="No such file"):
        read_key_file(tmp_path / "missing")
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(KeyFileError, match="is not a file"):
        read_key_file(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(write(tmp_path, "sk-1"))
    with pytest.raises(KeyFileError, match="cannot be read"):
        read_key_file(tmp_path / "link")


async def test_the_setting_is_named(tmp_path: Path):
    settings = UpstreamSettings(url="https://example.com/v1", model="m", key_file=str(tmp_path / "missing"))
    with pytest.raises(KeyFileError, match=r"router\.upstreams\.home\.key_file: .*missing cannot be read"):
        create_clients({"home": settings})
    unknown = UpstreamSettings(url="https://example.com/v1", model="m", key_file="~unknown-user/key")
    with pytest.raises(KeyFileError, match=r"~unknown-user/key cannot be read"):
        create_clients({"home": unknown})
    wrong = UpstreamSettings(url="https://example.com/v1", model="m", ca_file=str(tmp_path / "missing"))
    with pytest.raises(KeyFileError, match=r"router\.upstreams\.home\.ca_file cannot be used"):
        create_clients({"home": wrong})


async def test_a_client_does_not_show_its_key(tmp_path: Path):
    settings = UpstreamSettings(url="https://example.com/v1", model="m", key_file=str(write(tmp_path, "sk-1")))
    client = create_clients({"home": settings})["home"]
    assert "sk-1" not in f"{client!r} {settings!r} {client.build_error('failed')!r}"
    await client.close()


def test_secrets_of_tls_are_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SSLKEYLOGFILE", str(tmp_path / "secrets"))
    assert create_tls_context(None).keylog_filename is None


class Foreign:
    """Server of another maker: answers every request with the same bytes, or not at all."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.url = ""
        self.heads: list[str] = []
        """Request line and headers of each request."""
        self.open_connections = 0
        self.changed = asyncio.Condition()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._count(1)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
                await reader.readexactly(int(fields["content-length"]))
                self.heads.append(head)
                writer.write(self.answer)
        writer.close()
        await self._count(-1)

    async def _count(self, change: int) -> None:
        async with self.changed:
            self.open_connections += change
            self.changed.notify_all()

    async def wait_connections(self, wanted: int) -> None:
        async with asyncio.timeout(20), self.changed:
            await self.changed.wait_for(lambda: self.open_connections == wanted)


def build_answer(status: int, body: bytes = b"{}", **headers: str) -> bytes:
    """Return an HTTP answer; an underscore in the name of a header stands for a dash."""
    fields = {"content-type": "application/json", "content-length": str(len(body))}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"HTTP/1.1 {status} X", *(f"{name}: {value}" for name, value in fields.items() if value)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


@contextlib.asynccontextmanager
async def served(answer: bytes, **settings: Any) -> AsyncIterator[tuple[UpstreamClient, Foreign]]:
    """Run a foreign server, and yield a client of the server and the server."""
    foreign = Foreign(answer)
    server = await asyncio.start_server(foreign.serve, "127.0.0.1", 0)
    foreign.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    url = settings.pop("url", f"{foreign.url}/v1")
    if settings.pop("through_proxy", False):
        settings["proxy"] = foreign.url
    client = UpstreamClient("home", UpstreamSettings(url=url, model="m", **settings), "sk-1")
    try:
        yield client, foreign
    finally:
        await client.close()
        server.close()


async def fetch(client: UpstreamClient, *, stream: bool = False) -> bytes:
    async with client.request("/chat/completions", b"{}", stream=stream) as received:
        return b"".join([part async for part in received])


async def fail(client: UpstreamClient, *, stream: bool = False) -> UpstreamError:
    with pytest.raises(UpstreamError) as caught:
        await fetch(client, stream=stream)
    assert caught.value.message.startswith("the upstream home ")
    return caught.value


async def test_a_request_has_the_key_and_asks_for_no_compression():
    async with served(build_answer(200, b'{"a":1}')) as (client, foreign):
        assert await fetch(client) == b'{"a":1}'
        head = foreign.heads[0].lower()
    assert head.startswith("post /v1/chat/completions http/1.1\r\n")
    for field in ("authorization: bearer sk-1", "accept-encoding: identity", "content-type: application/json"):
        assert f"\r\n{field}\r\n" in head


@pytest.mark.parametrize(
    ("sent", "seconds"),
    [("7", 7.0), ("99999", 99999.0), ("100000", 1.0), ("", 1.0), ("\xb2", 1.0), ("-5", 1.0), ("soon", 1.0)],
)
async def test_a_rate_limit_is_passed_on_with_its_seconds(sent: str, seconds: float):
    async with served(build_answer(429, retry_after=sent)) as (client, _):
        error = await fail(client)
    assert (error.status, error.outcome, error.retry_after) == (503, "limited", seconds)


@pytest.mark.parametrize("status", [300, 302, 399])
async def test_redirects_are_named_and_not_followed(status: int):
    async with served(build_answer(status, location="/v1/chat/completions")) as (client, foreign):
        error = await fail(client)
        assert len(foreign.heads) == 1
    assert error.message == f"the upstream home answered {status}: redirects are not followed"
    assert (error.status, error.outcome, error.retry_after) == (502, "failed", None)


@pytest.mark.parametrize("status", [206, 402, 500])
async def test_any_other_status_is_a_failure_without_the_text_of_the_upstream(status: int):
    async with served(build_answer(status, b'{"error":{"message":"why"}}')) as (client, _):
        error = await fail(client)
    assert error.message == f"the upstream home answered {status}"
    assert (error.status, error.outcome) == (502, "failed")


@pytest.mark.parametrize("status", [400, 404, 413, 422])
@pytest.mark.parametrize("more", [0, 1])
async def test_the_reason_of_a_fault_of_the_request_is_passed_on_up_to_a_length(status: int, more: int):
    body = json.dumps({"error": {"message": "no such tool", "type": ""}}).encode()
    body = body.replace(b'""', b'"' + b"x" * (MAX_ERROR_BYTES + more - len(body)) + b'"')
    async with served(build_answer(status, body)) as (client, _):
        error = await fail(client)
    reason = "" if more else ": no such tool"
    assert error.message == f"the upstream home answered {status}{reason}"
    assert (error.status, error.outcome) == (400, "refused")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"error":"x"}', b'{"error":{"message":5}}', b'{"detail":"x"}'])
async def test_a_refusal_without_a_message_is_passed_on_without_one(body: bytes):
    async with served(build_answer(422, body)) as (client, _):
        assert (await fail(client)).message == "the upstream home answered 422"


@pytest.mark.parametrize(
    ("kind", "coding", "text"),
    [
        ("text/html; charset=utf-8", "", "answered with text/html, not application/json"),
        ("", "", "answered with no content type, not application/json"),
        ("text/event-stream", "", "answered with text/event-stream, not application/json"),
        ("application/json", "gzip", "sent a compressed answer, which was not requested"),
    ],
)
async def test_an_answer_of_another_type_or_coding_is_refused(kind: str, coding: str, text: str):
    async with served(build_answer(200, content_type=kind, content_encoding=coding)) as (client, _):
        assert (await fail(client)).message == f"the upstream home {text}"


@pytest.mark.parametrize(
    ("kind", "coding"), [("Application/JSON ; charset=utf-8", ""), ("application/json", "Identity")]
)
async def test_types_and_codings_are_compared_without_case(kind: str, coding: str):
    async with served(build_answer(200, content_type=kind, content_encoding=coding)) as (client, _):
        assert await fetch(client) == b"{}"


async def test_close_ends_the_connections_that_were_kept():
    async with served(build_answer(200)) as (client, foreign):
        await fetch(client)
        await fetch(client)
        assert (len(foreign.heads), foreign.open_connections) == (2, 1), "the connection is used again"
        await client.close()
        await foreign.wait_connections(0)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/v1", "http://127.0.0.1:9/v1/"])
async def test_requests_go_through_the_proxy_of_the_settings(url: str):
    async with served(build_answer(200), url=url, through_proxy=True) as (client, foreign):
        assert await fetch(client) == b"{}"
        assert foreign.heads[0].startswith("POST http://127.0.0.1:9/v1/chat/completions HTTP/1.1\r\n")


@pytest.mark.parametrize(("stream", "seconds"), [(True, "0.2"), (False, "0.4")])
async def test_silence_is_bounded_by_the_setting_for_its_kind_of_answer(stream: bool, seconds: str):
    async with served(b"", idle_seconds=0.2, total_seconds=0.4) as (client, _):
        assert (await fail(client, stream=stream)).message == f"the upstream home sent nothing for {seconds} s"


async def test_a_server_that_accepts_no_connection_is_named_with_the_time():
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as held:
        for _ in range(4):  # more than the kernel accepts for a program that accepts none
            waiting = held.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        url = f"http://127.0.0.1:{full.getsockname()[1]}/v1"
        async with served(b"", url=url, connect_seconds=0.3) as (client, _):
            error = await fail(client)
    assert error.message == "the upstream home did not accept a connection within 0.3 s"


async def test_more_requests_than_connections_are_refused_with_the_number():
    async with served(b"", connect_seconds=60.0) as (client, foreign):
        waiting = [asyncio.create_task(fetch(client)) for _ in range(MAX_CONNECTIONS)]
        await foreign.wait_connections(MAX_CONNECTIONS)
        client.settings = replace(client.settings, connect_seconds=0.1)  # all connections exist already
        error = await fail(client)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    assert error.message == f"the upstream home already has {MAX_CONNECTIONS} requests of this pool"
    assert (error.status, error.outcome, error.retry_after, error.is_fault) == (503, "limited", 1.0, False)
