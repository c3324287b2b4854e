"""Strict JSON parser for request bodies, which refuses any text that two parsers could read differently.

A body must be an object in UTF-8, without duplicate keys, NaN, Infinity and lone surrogates. In the texts of a prompt,
a lone surrogate is replaced instead. Clients that cut a text within an emoji send it again in each request.

The size of a body as Python objects is limited before it is parsed. `[[],[],...` takes 24 times its size as Python
objects, and a text with one character beyond U+FFFF takes four times its length. The necessary counts take a few passes
in C over the bytes, at most 60 ms for 8 MiB, and parse no value.
"""

import json
import re
from collections.abc import Iterable
from typing import Any, NoReturn, cast

from router.admission.request_limits import MAX_JSON_DEPTH, MAX_KEYS, MAX_TEXT_BYTES, MAX_TEXTS, MAX_VALUES
from router.errors import Problem, build_invalid

SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")
PROMPT_FIELDS = frozenset({"documents", "input", "instructions", "messages", "prompt", "query", "system", "tools"})
"""Fields of bodies whose texts are parts of a prompt."""
_BEYOND_BMP = bytes(range(0xF0, 0xF5))
"""UTF-8 bytes that begin a character beyond U+FFFF."""
_CONTINUATION = bytes(range(0x80, 0xC0))
"""UTF-8 bytes that continue a character."""
_ESCAPE_BYTES = 6
r"""Number of bytes of one escape `\uXXXX`."""

Body = dict[str, Any]


class _UnusableError(ValueError):
    """Raised for valid JSON that is refused. The message is the reason."""


def read_object(body: bytes, max_values: int = MAX_VALUES, repaired: frozenset[str] = frozenset()) -> Body | Problem:
    """Parse a body as one JSON object, or return a 400 problem with the reason and, if known, the place.

    The body may have at most `max_values` values and `MAX_TEXTS` strings. In the texts of the fields `repaired`, half
    of a surrogate pair becomes U+FFFD. Elsewhere it is refused.
    """
    refused = _check_width(body) or _check_counts(body, max_values)
    if refused is not None:
        return refused
    try:
        decoded: object = _decoder.decode(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        return build_invalid(f"the body is not UTF-8: byte {error.start} ({error.reason})")
    except json.JSONDecodeError as error:
        return build_invalid(f"the body is not JSON: {error.msg} at line {error.lineno} column {error.colno}")
    except RecursionError:
        return build_invalid("the body has too many levels of nesting")
    except ValueError as error:
        return build_invalid(f"the body cannot be used: {str(error)[:200]}")
    if not isinstance(decoded, dict):
        return build_invalid("the body must be a JSON object")
    parsed = cast("Body", decoded)
    if not SURROGATE_ESCAPE.search(body):
        return parsed
    for name in repaired & parsed.keys():
        parsed[name] = _replace_lone_surrogates(parsed[name])
    if _has_lone_surrogate(parsed):
        return build_invalid("a text has half of a surrogate pair (\\ud800-\\udfff alone), which is not a character")
    return parsed


def _check_width(body: bytes) -> Problem | None:
    """Return a 400 problem for a body that takes more than `MAX_TEXT_BYTES` as Python text, else None.

    A Python text takes 4 bytes for each character if any of its characters needs 4 bytes.
    """
    if len(body) * 4 <= MAX_TEXT_BYTES:
        return None
    wide = not body.isascii() and len(body.translate(None, _BEYOND_BMP)) < len(body)
    if not wide and not SURROGATE_ESCAPE.search(body):
        return None
    characters = len(body.translate(None, _CONTINUATION)) - (_ESCAPE_BYTES - 1) * body.count(b"\\u")
    if characters * 4 <= MAX_TEXT_BYTES:
        return None
    most = MAX_TEXT_BYTES // 4
    text = f"the body has {characters} characters; the limit is {most} if one is beyond U+FFFF, such as an emoji"
    return build_invalid(f"{text}: shorten it")


def _check_counts(body: bytes, max_values: int) -> Problem | None:
    """Return a 400 problem for a body with too many strings, or with too many commas, lists and objects, else None.

    Strings are found by their quotes, after escaped backslashes and quotes are removed. A text that is not JSON is
    counted correctly up to its first error, where a parser stops. A backslash outside a string is an error.
    """
    if len(body) <= max_values or (_count_values(body) <= max_values and body.count(b'"') // 2 <= MAX_TEXTS):
        return None  # even if every comma and bracket stood outside of texts
    bare = body.replace(rb"\\", b"").replace(rb"\"", b"") if b"\\" in body else body
    texts = bare.count(b'"') // 2
    if texts > MAX_TEXTS:
        return build_invalid(f"the body has {texts} strings, the limit is {MAX_TEXTS}: shorten it")
    values = _count_values(b"".join(bare.split(b'"')[::2]))
    if values <= max_values:
        return None
    return build_invalid(
        f"the body has {values} values (commas, lists and objects), the limit is {max_values}: shorten it"
    )


def _count_values(text: bytes) -> int:
    """Return the number of commas and opening brackets, in one pass that takes the same time for any number."""
    return len(text) - len(text.translate(None, b",[{"))


def encode_json(value: object, name: str, longest: int) -> str | Problem:
    """Encode a part of a body as compact JSON for another parser.

    `name` is the part in the body. Return a 400 problem with that name if the JSON has more than `longest` bytes, more
    than `MAX_JSON_DEPTH` levels, or a number that is not finite.
    """
    if _is_too_deep(value):
        return build_invalid(f"{name} is nested deeper than {MAX_JSON_DEPTH} levels", name)
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return build_invalid(f"{name} has a number that is too large", name)
    size = len(text.encode())
    return text if size <= longest else build_invalid(f"{name} has {size} bytes of JSON, the limit is {longest}", name)


def _is_too_deep(value: object) -> bool:
    level: list[Any] = [value]
    for _ in range(MAX_JSON_DEPTH + 1):
        level = [inner for item in level for inner in _list_children(item)]
        if not level:
            return False
    return True


def _list_children(value: object) -> Iterable[Any]:
    if isinstance(value, dict):
        return cast("Body", value).values()
    return cast("list[Any]", value) if isinstance(value, list) else ()


def _build_object(pairs: list[tuple[str, Any]]) -> Body:
    if len(pairs) > MAX_KEYS:
        raise _UnusableError(f"an object has {len(pairs)} keys, the limit is {MAX_KEYS}")
    members = dict(pairs)
    if len(members) != len(pairs):
        names: set[str] = set()
        twice = next(name for name, _ in pairs if name in names or names.add(name))
        raise _UnusableError(f"the key {twice[:64]!r} appears twice in one object")
    return members


def _refuse_constant(name: str) -> NoReturn:
    raise _UnusableError(f"{name} is not a JSON number")


_decoder = json.JSONDecoder(object_pairs_hook=_build_object, parse_constant=_refuse_constant)


def _replace_lone_surrogates(root: object) -> object:
    """Return a value in whose texts, but not keys, each lone surrogate is replaced by U+FFFD.

    Lists and objects are changed in place, without recursion.
    """
    whole = [root]
    waiting: list[Any] = [whole]
    while waiting:
        part = waiting.pop()
        for place in list(cast("Body", part)) if isinstance(part, dict) else range(len(part)):
            item = cast("object", part[place])
            if isinstance(item, str):
                part[place] = _SURROGATE.sub("\ufffd", item)
            elif isinstance(item, dict | list):
                waiting.append(item)
    return whole[0]


def _has_lone_surrogate(root: object) -> bool:
    """Return whether any key or text has a lone surrogate. The parser has already joined proper pairs."""
    waiting: list[Any] = [root]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            if not item.isascii() and not _is_encodable(item):
                return True
        elif isinstance(item, dict):
            waiting += item.keys()
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item
    return False


def _is_encodable(text: str) -> bool:
    """Return whether a text can be encoded in UTF-8, which has no code for half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
