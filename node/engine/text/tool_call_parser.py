"""Tool calls out of a block of model text: one parser for each model family, one form for all.

Parsers are mlx-lm's. They raise whatever they like at text that they do not understand, and some give lists, tuples,
sets or text for arguments. A block counts as read only if every call in it has a name and an object of arguments that
can be written as JSON; else it gives nothing, and the caller shows the block as it was written.
"""

import json
from collections.abc import Callable, Sequence
from typing import Final, cast

Parse = Callable[[str, list[object]], object]
"""Takes a block without its markers and the request's tools; gives a call or a list of them; may raise anything."""

LONGEST: Final = 1 << 18
"""Characters of a block that a parser is shown. Some of their patterns take time with the square of the length."""


class Calls:
    """Reads and counts the calls of one choice. `prefix` begins their ids; without `parse` no block is a call. `tools`
    may be given in several ways: a block that the parser cannot read by one is read by the next."""

    def __init__(self, prefix: str, parse: Parse | None, tools: Sequence[list[object]], end: str) -> None:
        self.count = 0
        self.end = end
        self._prefix = prefix
        self._parse = parse
        self._tools = tools

    def read(self, block: str) -> list[str]:
        """Give each call of the block as JSON text (see wire.frames.Delta); nothing if the block cannot be read."""
        if self._parse is None or len(block) > LONGEST:
            return []
        for tools in self._tools:
            calls = self._read(self._parse, block, tools)
            if calls:
                self.count += len(calls)
                return calls
        return []

    def _read(self, parse: Parse, block: str, tools: list[object]) -> list[str]:
        try:
            parsed = parse(block, tools)
            found = cast("list[object]", parsed) if isinstance(parsed, list) else [parsed]
            return [self._written(self.count + at, call) for at, call in enumerate(found)]
        except Exception:  # whatever a parser does to text of a model is no reason to lose its answer
            return []

    def _written(self, index: int, call: object) -> str:
        if not isinstance(call, dict):
            raise TypeError("a call is an object")
        parts = cast("dict[object, object]", call)
        name = parts["name"]
        if not isinstance(name, str) or not name:
            raise ValueError("a call has a name")
        whole = {"index": index, "id": f"{self._prefix}{index}", "name": name, "arguments": _text(parts["arguments"])}
        return _json(whole)


def _text(arguments: object) -> str:
    """Write arguments as the JSON text of an object; text must be one already, and nothing is an empty one."""
    if isinstance(arguments, str):
        arguments = cast("object", json.loads(arguments or "{}"))
    if not isinstance(arguments, dict | None):
        raise TypeError("arguments are an object")
    return _json(cast("dict[object, object]", arguments or {}))


def _json(found: object) -> str:
    """Write JSON that can be sent: half a surrogate pair, which JSON can spell and UTF-8 cannot, stays escaped."""
    text = json.dumps(found, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(found, allow_nan=False)
    return text
