"""Replacement of tool names that the format of a model cannot express.

Clients of MCP servers send names such as `server.list-files`. The parser of Gemma's format loses calls with such a
name, and the parser of Mistral's format returns only the part after the dot. The prompt of such a model therefore has
other names, and the calls in its answer get the names of the client again.
"""

import json
import keyword
import re
from collections.abc import Mapping
from typing import Final, cast

from msgspec.structs import replace

from wire.frames import Generate, ToolCall

_WORD: Final = re.compile(r"[\w-]+", re.ASCII)
_IDENTIFIER: Final = re.compile(r"[A-Za-z_]\w*", re.ASCII)
NAMES: Final[Mapping[str, re.Pattern[str]]] = {
    "function_gemma": _IDENTIFIER,
    "gemma4": _WORD,
    "harmony": re.compile(r"[\w.-]+", re.ASCII),
    "kimi_k2": re.compile(r"[\w./-]+", re.ASCII),
    "mistral": _WORD,
    "pythonic": _IDENTIFIER,
}
"""Patterns of the tool names that a model's format can express, by the name of the format's parser. Identifiers must
not be keywords of Python. Formats of all other parsers can express every name."""
_OTHER: Final = re.compile(r"\W", re.ASCII)


def find_tool_names(parser: str, tools: str) -> dict[str, str]:
    """Return a new name for each tool name that the format of `parser` cannot express, by the client's name.

    `tools` is the JSON array of a request. Entries that are not functions are ignored. The result is empty if `tools`
    is not a JSON array, which the tokenizer refuses.
    """
    allowed = NAMES.get(parser)
    if allowed is None or not tools:
        return {}
    names = [name for name in _list_names(tools) if name]
    taken = {name for name in names if _is_allowed(allowed, name)}
    renamed: dict[str, str] = {}
    for name in names:
        if name in taken or name in renamed:
            continue
        base = new = _replace_characters(name)
        number = 1
        while new in taken:
            number += 1
            new = f"{base}_{number}"
        taken.add(new)
        renamed[name] = new
    return renamed


def rename_tools(request: Generate, names: Mapping[str, str]) -> Generate:
    """Return the request with renamed tools. `names` maps a client's tool name to its new name; other names stay
    unchanged.

    Names change in the tools, in earlier tool calls and their results, and in the tool that the grammar requires.
    """
    if not names:
        return request
    grammar = request.params.grammar
    if grammar is not None:
        grammar = replace(grammar, tool=names.get(grammar.tool, grammar.tool))
    messages = tuple(
        replace(
            message,
            name=names.get(message.name, message.name) if message.role == "tool" else message.name,
            tool_calls=tuple(
                ToolCall(call.id, names.get(call.name, call.name), call.arguments) for call in message.tool_calls
            ),
        )
        for message in request.messages
    )
    return replace(
        request,
        tools=_rename_functions(request.tools, names),
        messages=messages,
        params=replace(request.params, grammar=grammar),
    )


def _list_names(tools: str) -> list[str]:
    return [str(function.get("name") or "") for function in map(_get_function, _parse(tools))]


def _rename_functions(tools: str, names: Mapping[str, str]) -> str:
    parsed = _parse(tools)
    for function in map(_get_function, parsed):
        name = function.get("name")
        if isinstance(name, str) and name in names:
            function["name"] = names[name]
    return json.dumps(parsed, ensure_ascii=False)


def _parse(tools: str) -> list[object]:
    try:
        parsed = cast("object", json.loads(tools))
    except ValueError:
        return []
    return cast("list[object]", parsed) if isinstance(parsed, list) else []


def _get_function(tool: object) -> dict[str, object]:
    function = cast("dict[str, object]", tool).get("function") if isinstance(tool, dict) else None
    return cast("dict[str, object]", function) if isinstance(function, dict) else {}


def _is_allowed(allowed: re.Pattern[str], name: str) -> bool:
    return allowed.fullmatch(name) is not None and not (allowed is _IDENTIFIER and keyword.iskeyword(name))


def _replace_characters(name: str) -> str:
    """Return a name as an identifier, which every format can express."""
    new = _OTHER.sub("_", name)
    return new if _is_allowed(_IDENTIFIER, new) else f"_{new}"
