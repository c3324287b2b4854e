"""Keeps secrets and what people write to models out of every log.

Theory. What nobody logs cannot leak, so no event of ours carries a prompt, a key or a token. This is the net below that
rope, for what others say: exceptions quote values, libraries log requests. It works twice: on the fields of an event by
their names, and on the finished line by what secrets look like. Pure.

Of an exception only its type, the functions that it went through, and a bounded message are kept. Where the message is
about somebody's text (a template, a grammar, a tokenizer: PRIVATE), not even that.
"""

import re
import traceback
from collections.abc import Mapping, MutableMapping
from types import TracebackType
from typing import Any, cast

HIDDEN = "[hidden]"
NAMES = frozenset({
    "authorization", "api_key", "apikey", "key", "secret", "token_text", "cookie", "set_cookie", "password", "pepper",
    "prompt", "prompts", "messages", "content", "input", "text", "texts", "ids", "image_url", "tools", "body",
})  # fmt: skip
"""Fields that never stand in a log, whatever they hold."""
PRIVATE = frozenset({"door", "grammar", "text"})
"""Events of the engine that are about somebody's text: of their exceptions no message is kept."""
LONGEST_MESSAGE = 300
_SHAPES = re.compile(
    r"mp_[a-z2-7]{4,16}_[A-Za-z0-9_-]{20,}"  # our API keys
    r"|mpj1\.[A-Za-z0-9.]{20,}"  # our join tokens
    r"|sk-[A-Za-z0-9_-]{16,}|hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}"
)
_NAMED = re.compile(
    r"(\b(?i:bearer|basic)\s+|\b(?i:authorization|api[_-]?key|password|secret)\\?[\"']?\s*[:=]\s*\\?[\"']?)"
    r"(?!(?i:bearer|basic)\b)[^\s\"'\\,;}\]\[]{6,}"
)
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)")
Failure = tuple[type[BaseException], BaseException, TracebackType | None]


def hide(text: str) -> str:
    """Put HIDDEN in the place of everything in a text that looks like a secret."""
    return _PRIVATE_KEY.sub(HIDDEN, hide_in_line(text))


def hide_in_line(line: str) -> str:
    """The same of a finished line, whose quotes and brackets stay where they are."""
    return _NAMED.sub(rf"\1{HIDDEN}", _SHAPES.sub(HIDDEN, line))


def redact(fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Hide the fields of an event that must not be told, at any depth, and secrets in all others."""
    for name, value in fields.items():
        fields[name] = HIDDEN if name.lower().replace("-", "_") in NAMES else _clean(value)
    return fields


def _clean(value: object) -> object:
    if isinstance(value, str):
        return hide(value)
    if isinstance(value, Mapping):
        return redact({str(name): inner for name, inner in cast("Mapping[object, object]", value).items()})
    if isinstance(value, list | tuple):
        return [_clean(inner) for inner in cast("list[object]", value)]
    return value


def trace(failure: Failure, *, private: bool) -> str:
    """Write an exception down: where it went through, without the lines of code and their values, and its message
    unless it is `private`."""
    kind, error, where = failure
    frames = traceback.extract_tb(where)
    lines = [f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}" for frame in frames]
    message = HIDDEN if private else hide(" ".join(str(error).split()))[:LONGEST_MESSAGE]
    cause = error.__cause__
    behind = "" if cause is None else f" from {type(cause).__name__}"
    return f"{kind.__name__}{behind}: {message}\n" + "\n".join(lines)
