"""Streamed chats over raw sockets: the same client for every server. It records the time of each event with text, and
the usage."""

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.bench.router.load import connect, request

WORDS = (
    "value",
    "index",
    "module",
    "class",
    "method",
    "string",
    "list",
    "return",
    "object",
    "import",
    "default",
    "function",
    "name",
    "type",
    "error",
)
TEXTS = ("content", "reasoning", "reasoning_content")


@dataclass(slots=True)
class Chat:
    """One answer: seconds (monotonic) of its request and of each event with text."""

    asked: float = 0.0
    times: list[float] = field(default_factory=list[float])
    prompt: int = 0
    tokens: int = 0
    ended: bool = False
    error: str = ""

    @property
    def first(self) -> float:
        """Return the seconds to the first text."""
        return self.times[0] - self.asked


def words(random: Random, count: int) -> str:
    """Return a new random prompt of `count` words, each about one token."""
    return " ".join(random.choice(WORDS) for _ in range(count))


def body(model: str, prompt: str, tokens: int) -> dict[str, object]:
    """Return a greedy, streamed request for `tokens` tokens (a random model hardly ever ends earlier)."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def chat(base: str, key: str, asked: Mapping[str, object], heard: Callable[[], object] | None = None) -> Chat:
    """Send a chat and read to the end; `heard` is called at each text. A cancelled task closes the connection."""
    reader, writer = await connect(base)
    seen = Chat(time.monotonic())
    try:
        writer.write(request(base, key, dict(asked)))
        while line := await reader.readline():
            if line.startswith(b"data: [DONE]"):
                seen.ended = True
                break
            if line.startswith(b"data: {"):
                _take(seen, json.loads(line[6:]), time.monotonic(), heard)
    finally:
        writer.close()
    return seen


def _take(seen: Chat, event: Mapping[str, Any], now: float, heard: Callable[[], object] | None) -> None:
    seen.error = seen.error or str(event.get("error") or "")
    usage = event.get("usage")
    if isinstance(usage, dict):
        seen.prompt, seen.tokens = usage["prompt_tokens"], usage["completion_tokens"]
    for choice in event.get("choices") or ():
        if any(choice["delta"].get(name) for name in TEXTS):
            seen.times.append(now)
            if heard is not None:
                heard()


async def together(base: str, key: str, bodies: Iterable[Mapping[str, object]]) -> list[Chat]:
    """Run all chats at once."""
    return list(await asyncio.gather(*[chat(base, key, one) for one in bodies]))
