"""Remove secrets, prompts and answers from log events. Pure.

Events of this project contain no prompt, key or token. Redaction is a second protection, because exceptions quote
values and libraries log requests. Fields of an event are redacted by their names, and texts by the patterns of secrets.

An exception is logged with its type, a bounded message and the functions of its traceback. Messages of PRIVATE events
are removed, because errors of templates, grammars and tokenizers quote the text of clients.
"""

import re
import traceback
from collections.abc import Mapping, MutableMapping
from types import TracebackType
from typing import Any, cast

HIDDEN = "[hidden]"
"""Text in place of a secret."""
NAMES = frozenset(
    {
        "authorization",
        "api_key",
        "apikey",
        "key",
        "secret",
        "token_text",
        "cookie",
        "set_cookie",
        "password",
        "pepper",
        "prompt",
        "prompts",
        "messages",
        "content",
        "input",
        "text",
        "texts",
        "ids",
        "image_url",
        "tools",
        "body",
    }
)
"""Names of fields whose values are always hidden. Upper case, and `-` in place of `_`, make no difference."""
PRIVATE = frozenset({"prepare", "grammar", "text"})
"""Events of the engine whose exceptions can quote the text of a client."""
MAX_MESSAGE_CHARS = 300
"""Maximum characters of the message of an exception in the log."""
_SHAPES = re.compile(
    r"mp_[a-z2-7]{4,16}_[A-Za-z0-9_-]{20,}"  # API keys
    r"|mpj1\.[A-Za-z0-9.]{20,}"  # join tokens
    r"|sk-[A-Za-z0-9_-]{16,}|hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}"
)
_NAMED = re.compile(
    r"(\b(?i:bearer|basic)\s+|\b(?i:authorization|api[_-]?key|password|secret)\\?[\"']?\s*[:=]\s*\\?[\"']?)"
    r"(?!(?i:bearer|basic)\b)[^\s\"'\\,;}\]\[]{6,}"
)
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)")
Failure = tuple[type[BaseException], BaseException, TracebackType | None]
"""Type, exception and traceback, as from `sys.exc_info`."""


def hide_secrets(text: str) -> str:
    """Replace secrets of known forms in a text by HIDDEN.

    These are API keys, access tokens, values after a name such as `password`, and private keys in PEM.
    """
    return _PRIVATE_KEY.sub(HIDDEN, hide_secrets_in_line(text))


def hide_secrets_in_line(line: str) -> str:
    """Replace secrets in a rendered log line by HIDDEN. A line of JSON stays valid.

    Private keys in PEM are not detected.
    """
    return _NAMED.sub(rf"\1{HIDDEN}", _SHAPES.sub(HIDDEN, line))


def redact_fields(fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Hide the values of private fields (NAMES) at any depth, and secrets in the texts of all other fields.

    Change `fields` in place, and return it.
    """
    for name, value in fields.items():
        fields[name] = HIDDEN if name.lower().replace("-", "_") in NAMES else _redact_value(value)
    return fields


def _redact_value(value: object) -> object:
    if isinstance(value, str):
        return hide_secrets(value)
    if isinstance(value, Mapping):
        return redact_fields({str(name): inner for name, inner in cast("Mapping[object, object]", value).items()})
    if isinstance(value, list | tuple):
        return [_redact_value(inner) for inner in cast("list[object]", value)]
    return value


def format_exception(failure: Failure, *, private: bool) -> str:
    """Format an exception: type, type of its cause, message, and functions of the traceback without source lines.

    The message is redacted, and cut to MAX_MESSAGE_CHARS. With `private`, HIDDEN replaces it.
    """
    kind, error, where = failure
    frames = traceback.extract_tb(where)
    lines = [f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}" for frame in frames]
    message = HIDDEN if private else hide_secrets(" ".join(str(error).split()))[:MAX_MESSAGE_CHARS]
    cause = error.__cause__
    behind = "" if cause is None else f" from {type(cause).__name__}"
    return f"{kind.__name__}{behind}: {message}\n" + "\n".join(lines)
