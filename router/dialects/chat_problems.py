"""What pydantic found wrong with a chat body, as the one 400 that names the parameter.

A body may be wrong in many places; what is not offered is said first, because no correction of the rest would help.
"""

import difflib
from typing import Any, cast

import msgspec
from pydantic import ValidationError

from router.dialects.chat_body import INSTEAD, KNOWN
from router.problems import Problem, invalid
from wire.refusals import Code

_TAGS = frozenset({"text", "parts", "one", "list", "text_part", "refusal_part"})
_TAGGED = frozenset({"content", "stop"})
_LATER = frozenset({"function_call", "audio", "include_obfuscation"})
_CHOICES = frozenset({"required", "function", "allowed_tools", "custom"})
_LONGEST = 64


class _Error(msgspec.Struct, frozen=True, gc=False):
    type: str
    loc: tuple[str | int, ...]
    msg: str
    input: Any


def unsupported(param: str, why: str = "") -> Problem:
    """Give the 400 for what no model here offers, with what to do instead."""
    text = why or f"{param} is not supported by the models of this cluster"
    instead = INSTEAD.get(param.rpartition(".")[2], "")
    return invalid(f"{text}: {instead}" if instead else text, param, Code.UNSUPPORTED.value)


def from_validation(error: ValidationError) -> Problem:
    """Give the 400."""
    found = [
        _Error(one["type"], one["loc"], one["msg"], one["input"])
        for one in error.errors(include_url=False, include_context=False)
    ]
    later = next((problem for problem in map(_later, found) if problem is not None), None)
    if later is not None:
        return later
    first = found[0]
    if first.type == "extra_forbidden":
        return _unknown(first.loc)
    path = _path(first.loc)
    return invalid(f"{path}: {first.msg}", path)


def _later(error: _Error) -> Problem | None:
    """Give the problem if this error asks for something that is not offered; None when it is plainly wrong."""
    path = _path(error.loc)
    if error.loc[-1] in _LATER:
        return unsupported(path)
    if error.loc == ("tool_choice",):
        kind = _choice(error.input)
        return unsupported(path, f"tool_choice {kind} is not offered yet: use auto") if kind else None
    if error.loc[-1] == "type" and error.type == "literal_error" and isinstance(error.input, str):
        return unsupported(path, f"{path} {error.input[:_LONGEST]!r} is not supported by the models of this cluster")
    return None


def _choice(asked: object) -> str:
    kind = cast("dict[str, object]", asked).get("type") if isinstance(asked, dict) else asked
    return kind if isinstance(kind, str) and kind in _CHOICES else ""


def _unknown(loc: tuple[str | int, ...]) -> Problem:
    name = str(loc[-1])[:_LONGEST]
    near = difflib.get_close_matches(name, KNOWN, 1, 0.7) if len(loc) == 1 else []
    hint = f": did you mean {near[0]}?" if near else ""
    return invalid(f"unknown field {name!r}{hint}", _path(loc)[:128])


def _path(loc: tuple[str | int, ...]) -> str:
    """Write `messages[0].content[1].text` without the names of union branches and marks of keys."""
    path = ""
    before: str | int = ""
    for step in loc:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step != "[key]" and not (step in _TAGS and (before in _TAGGED or isinstance(before, int))):
            path += f".{step[:_LONGEST]}" if path else step[:_LONGEST]
        before = step
    return path
