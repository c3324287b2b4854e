"""Tool calls from a block of model text: one parser for each model family, one result format.

The parsers may raise any exception for text that they cannot parse. A block is accepted only if every call has a name
and arguments. The arguments must be an object, or the JSON text of an object. Null and empty text count as `{}`. For
any other arguments, such as lists or sets, the result is empty, and the caller sends the block as content.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, cast

from node.engine.text.stop_strings import count_overlap

Parse = Callable[[str, list[object]], object]
"""Function `parse(block, tools)` that parses a block without its markers. It returns a call or a list of calls, and may
raise any exception."""

NO_NAMES: Final[Mapping[str, str]] = MappingProxyType({})
MAX_BLOCK_CHARS: Final = 1 << 18
"""Maximum characters of a block for a parser, because the time of some patterns is quadratic in the length."""


class ToolCallParser:
    """Parser of the tool calls in one choice; `count` is the number of calls so far.

    The id of a call is `prefix` and its index. If `parse` is None, no block is a call. `tools` has one or more forms of
    the request's tools; if the parser returns no valid calls with one form, the next is tried. `end` is the marker at
    the end of a call; empty if a call ends with the answer. `client_names` has the client's names of tools by the names
    that the model uses, where they differ. `call_end` is the end of a call within a block of several calls; empty if a
    block has only one call.
    """

    def __init__(
        self,
        prefix: str,
        parse: Parse | None,
        tools: Sequence[list[object]],
        end: str,
        client_names: Mapping[str, str] = NO_NAMES,
        call_end: str = "",
    ) -> None:
        self.count = 0
        self.end = end
        self._prefix = prefix
        self._parse = parse
        self._tools = tools
        self._client_names = client_names
        self._call_end = call_end

    def parse_block(self, block: str) -> list[str]:
        """Parse a block without its markers. Return each call as JSON text (see `wire.frames.Delta`), and add the calls
        to `count`.

        Return an empty list if the block is not a call or has more than `MAX_BLOCK_CHARS` characters. Never raise.
        """
        if self._parse is None or len(block) > MAX_BLOCK_CHARS:
            return []
        for tools in self._tools:
            calls = self._parse_calls(self._parse, block, tools)
            if calls:
                self.count += len(calls)
                return calls
        return []

    def list_complete_parts(self, block: str, start: str) -> list[str]:
        """Return the prefixes of an unfinished block that can consist of complete calls, the longest first.

        `start` is the marker before the block. Calls that end with the answer may be separated by this marker. Such a
        call is complete if it ends with a closing bracket, because its arguments are JSON.
        """
        if self.end:
            before, end, _ = block.rpartition(self._call_end) if self._call_end else ("", "", "")
            return [before + end] if end else []
        block = block[: len(block) - count_overlap(block, start)]
        whole = [block] if block.rstrip().endswith(("}", "]")) else []
        return [*whole, block.rpartition(start)[0]]

    def _parse_calls(self, parse: Parse, block: str, tools: list[object]) -> list[str]:
        try:
            parsed = parse(block, tools)
            found = cast("list[object]", parsed) if isinstance(parsed, list) else [parsed]
            return [self._render_call(self.count + at, call) for at, call in enumerate(found)]
        except Exception:  # a parser's failure on model text must not lose the answer
            return []

    def _render_call(self, index: int, call: object) -> str:
        if not isinstance(call, dict):
            raise TypeError("a call is an object")
        parts = cast("dict[object, object]", call)
        name = parts["name"]
        if not isinstance(name, str) or not name:
            raise ValueError("a call has a name")
        made = {
            "index": index,
            "id": f"{self._prefix}{index}",
            "name": self._client_names.get(name, name),
            "arguments": _render_arguments(parts["arguments"]),
        }
        return _render_json(made)


def _render_arguments(arguments: object) -> str:
    """Return arguments as the JSON text of an object. Text must be the JSON of an object; empty arguments become an
    empty object."""
    if isinstance(arguments, str):
        arguments = cast("object", json.loads(arguments or "{}"))
    if not isinstance(arguments, dict | None):
        raise TypeError("arguments are an object")
    return _render_json(cast("dict[object, object]", arguments or {}))


def _render_json(found: object) -> str:
    """Return JSON that can be sent: an unpaired surrogate, which JSON can express and UTF-8 cannot, stays escaped."""
    text = json.dumps(found, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(found, allow_nan=False)
    return text
