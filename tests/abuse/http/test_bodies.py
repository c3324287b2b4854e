"""Valid and invalid bodies within 8 MiB, from a client with a key.

No body may hold the loop, or take more than eight times the memory of the longest body.
"""

import asyncio
import gc
import json
import math
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from coordinator.run import GC_THRESHOLD_OBJECTS, SWITCH_SECONDS
from tests.abuse.http.test_http_port import ask, error, raw, request, status
from tests.effort import thin_cases
from tests.support.cluster.loopback_cluster import LoopbackCluster, LoopbackNode, a_model
from tests.support.loop_watch import max_held_seconds, watch_loop, watch_server
from tests.support.processes import Pool, pool
from wire.frames import Delta, Generate, Logprob
from wire.units import MIB

pytestmark = pytest.mark.slow

BODY_BYTES = 8 * MIB
MAX_MEMORY_BYTES = 8 * BODY_BYTES
CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES, OLLAMA = "/v1/responses", "/api/chat"


def filled(start: bytes, item: bytes, end: bytes, most: int = BODY_BYTES) -> bytes:
    """Repeat an item between a start and an end, up to 8 MiB or `most` times."""
    count = min(most, (BODY_BYTES - len(start) - len(end)) // (len(item) + 1))
    return start + b",".join([item] * count) + end


def chat(content: bytes) -> bytes:
    return b'{"model":"none","max_tokens":1,"messages":[{"role":"user","content":' + content + b"}]}"


def keys(count: int) -> bytes:
    return b"{" + b",".join(b'"%x":1' % number for number in range(count)) + b"}"


LIST = b'{"model":"none","max_tokens":1,"messages":['
ITEMS = b'{"model":"none","input":['
PROMPT = b'{"model":"none","prompt":['
SAYS = b'{"role":"user","content":"' + b"a" * 400 + b'"}'
THINKS = b'{"type":"reasoning","summary":[{"type":"summary_text","text":"' + b"a" * 400 + b'"}]}'
CALLS = b'{"role":"assistant","tool_calls":[' + b",".join([b'{"function":{"name":"a","arguments":{}}}'] * 100) + b"]}"
HOSTILE: dict[str, tuple[str, Callable[[], bytes], int]] = {
    "wrong parts": (CHAT, lambda: filled(LIST + b'{"role":"user","content":[', b"1", b"]}]}"), 400),
    "many messages": (CHAT, lambda: filled(LIST, SAYS, b"]}", 16_384), 404),
    "few wrong parts": (CHAT, lambda: filled(LIST + b'{"role":"user","content":[', b"1", b"]}]}", 60_000), 400),
    "empty lists": (CHAT, lambda: filled(LIST, b"[]", b"]}"), 400),
    "empty objects": (RESPONSES, lambda: filled(ITEMS, b"{}", b"]}"), 400),
    "empty messages": (CHAT, lambda: filled(LIST, b'{"role":"user","content":""}', b"]}"), 400),
    "unknown keys": (CHAT, lambda: keys(700_000), 400),
    "wrong last": (CHAT, lambda: filled(LIST, SAYS, b",{}]}", 16_383), 400),
    "wrong ids": (COMPLETIONS, lambda: filled(PROMPT + b"1,", b'"a"', b"]}"), 400),
    "lists of ids": (COMPLETIONS, lambda: filled(PROMPT, b"[1]", b"]}"), 400),
    "biases": (CHAT, lambda: LIST + SAYS + b'],"logit_bias":' + keys(1024) + b"}", 400),
    "empty tools": (CHAT, lambda: filled(LIST + SAYS + b'],"tools":[', b"{}", b"]}", 60_000), 400),
    "one text": (CHAT, lambda: chat(b'"' + b"a" * (BODY_BYTES - 100) + b'"'), 404),
    "escapes": (CHAT, lambda: chat(b'"' + b"\\n" * (BODY_BYTES // 2 - 100) + b'"'), 404),
    "pairs": (CHAT, lambda: chat(b'"' + b"\\ud83d\\ude00" * (BODY_BYTES // 12 - 100) + b'"'), 404),
    "one wide text": (CHAT, lambda: chat(b'"' + b"a" * (BODY_BYTES - 200) + b'\xf0\x9f\x98\x80"'), 400),
    "one wide escape": (CHAT, lambda: chat(b'"' + b"a" * (BODY_BYTES - 200) + b'\\ud83d\\ude00"'), 400),
    "wide text of 2 MiB": (CHAT, lambda: chat(b'"' + b"a" * (BODY_BYTES // 4 - 200) + b'\xf0\x9f\x98\x80"'), 404),
    "many parts": (CHAT, lambda: chat(filled(b"[", b'{"type":"text","text":"' + b"a" * 1900 + b'"}', b"]", 4096)), 404),
    "unknown parts": (CHAT, lambda: filled(LIST, SAYS[:-1] + b',"colour":1}', b"]}", 13_000), 404),
    "unknown tools": (
        CHAT,
        lambda: filled(LIST + SAYS + b'],"tools":[', b'{"type":"web_search","a":[1,2,3]}', b"]}", 128),
        404,
    ),
    "one turn": (MESSAGES, lambda: filled(LIST, SAYS, b"]}", 16_384), 404),
    "one thought": (RESPONSES, lambda: filled(ITEMS, THINKS, b"]}", 10_000), 404),
    "calls without results": (
        OLLAMA,
        lambda: filled(
            LIST.replace(b'"max_tokens":1,', b"") + b",".join([CALLS] * 100) + b",",
            b'{"role":"tool","content":"a"}',
            b"]}",
            5_000,
        ),
        404,
    ),
    "ids": (COMPLETIONS, lambda: filled(PROMPT, b"123456", b"]}", 500_000), 404),
}
"""Route, body and expected status by name. 404 is for a valid body that names a missing model."""


@pytest.fixture(scope="module")
def running() -> Iterator[Pool]:
    with tempfile.TemporaryDirectory(prefix="mp-") as folder, pool(Path(folder)) as made:
        made.up()
        made.join("one", "engine.scripted.step_ms=1")
        yield made


def peak_bytes(pid: int) -> int:
    """Return the peak memory of a process since the last `forget_peak`."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def forget_peak(pid: int) -> bool:
    """Reset the peak; return whether the kernel supports that."""
    forget = Path(f"/proc/{pid}/clear_refs")
    if forget.exists():
        forget.write_text("5")
    return forget.exists()


@pytest.mark.parametrize("name", thin_cases(list(HOSTILE), 4, kept=2))
async def test_no_body_holds_the_loop_or_takes_much_memory(running: Pool, name: str):
    path, make, expected = HOSTILE[name]
    body = make()
    assert len(body) <= BODY_BYTES
    assert running.coordinator is not None
    pid = running.coordinator.pid
    measured = forget_peak(pid)
    before = psutil.Process(pid).memory_info().rss
    least = math.inf  # the best of up to four runs, because a busy machine only makes it longer
    for _ in range(4):
        with watch_server(running.base, pid) as held:
            for _ in range(2):
                head = request(running, f"content-length: {len(body)}", path=path)
                answer = await raw(running, head + body)
                assert status(answer) == expected, answer
        least = min(least, held.seconds)
        if least < max_held_seconds():
            break
    assert least < max_held_seconds()
    if measured:
        assert peak_bytes(pid) - before < MAX_MEMORY_BYTES


async def test_refusal_of_a_hostile_body_names_the_limit(running: Pool):
    for name, words in (
        ("wrong parts", "values"),
        ("empty messages", "strings"),
        ("few wrong parts", "messages[0].content[0]"),
    ):
        path, make, _ = HOSTILE[name]
        body = make()
        answer = await raw(running, request(running, f"content-length: {len(body)}", path=path) + body)
        assert words in error(answer)["message"]
    body = b'{"model":"none","messages":[{"role":"user","content":"a"}],"metadata":' + keys(2049) + b"}"
    assert "2049 keys" in error(await raw(running, request(running, f"content-length: {len(body)}") + body))["message"]


async def test_short_requests_are_answered_while_long_bodies_are_read(running: Pool):
    body = HOSTILE["many messages"][1]()
    head = request(running, f"content-length: {len(body)}")
    long = [asyncio.create_task(raw(running, head + body)) for _ in range(8)]
    times: list[float] = []
    while not all(one.done() for one in long):
        began = time.monotonic()
        assert await ask(running) == 200
        times.append(time.monotonic() - began)
    assert {status(await one) for one in long} == {404}
    assert sorted(times)[len(times) // 2] < 1.0


async def test_a_long_chat_is_answered(running: Pool):
    """A body that the thread parses becomes the same request as one that the loop parses."""
    question: dict[str, Any] = {
        "model": "scripted-1",
        "messages": [{"role": "user", "content": "é" * 2000}] * 40,
        "max_tokens": 3,
    }
    assert await ask(running, body=json.dumps(question).encode()) == 200


@pytest.fixture
def as_a_coordinator() -> Iterator[None]:
    """Configure this process like `coordinator.run`, and exclude the objects of the tests from garbage collection."""
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD_OBJECTS, 20, 20)
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("as_a_coordinator")
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_long_answer_with_log_probabilities_does_not_hold_the_loop(path: str):
    """16 choices of 800 tokens with 20 alternatives each: 22 MiB of JSON for a chat."""
    alternatives = tuple((b"word%d" % number, -2.0 - number) for number in range(20))
    tokens = tuple(Logprob(b"token%d" % number, -1.0, alternatives) for number in range(800))

    def play(asked: Generate) -> tuple[list[Delta], str]:
        return [Delta(asked.request, choice, (1,), ((0, "x"),), tokens) for choice in range(asked.params.n)], "stop"

    cluster = LoopbackCluster(LoopbackNode("a", play=play, models=(a_model(features=("logprobs",)),)))
    question = {"model": "tiny", "max_tokens": 800, "n": 16, "prompt": "x", "logprobs": 20}
    if path == CHAT:
        chats = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 20}
        question = {name: value for name, value in question.items() if name not in ("prompt", "logprobs")} | chats
    body = json.dumps(question).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {cluster.key}\r\nconnection: close\r\n"
    async with cluster.serving() as url:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        with watch_loop() as held:
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            pieces = [piece async for piece in _pieces(reader)]
        writer.close()
    answer = json.loads(b"".join(pieces).partition(b"\r\n\r\n")[2])
    assert len(answer["choices"]) == 16
    found = answer["choices"][15]["logprobs"]
    last = found["content"][-1]["top_logprobs"] if path == CHAT else found["top_logprobs"][-1]
    assert len(last) == 20
    assert held.ticks > 5
    assert held.seconds < max_held_seconds()


async def _pieces(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while piece := await reader.read(1 << 18):
        yield piece
