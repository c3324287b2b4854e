"""Conversion of the errors of pydantic into one 400 problem that names the wrong parameter.

A body may be wrong in many places. A field that is not supported is reported first, because correcting the rest would
not help.
"""

import difflib
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import msgspec
from pydantic import ValidationError

from router.errors import Problem, build_invalid
from wire.refusals import RefusalCode

_TAGS = frozenset({"text", "parts", "one", "list"})
_TAGGED = frozenset({"content", "stop", "system", "input", "output", "prompt", "think", "tool_choice"})
_NOTHING: Mapping[str, str] = MappingProxyType({})
_LATER = frozenset({"function_call", "audio", "include_obfuscation", "images"})
_QUESTIONS = frozenset({"contents", "input", "instructions", "messages", "prompt", "system"})
_FORMS = frozenset({"format", "output_config", "output_format", "response_format", "structured_outputs", "text"})
"""Fields that define the format of an answer. An unknown field in them would change the answer."""
_WITH_FORMS = frozenset({"output_config", "text"})
"""Fields with a member `format` and with other members, to which new versions of clients add more."""
_MAX_VALUE_CHARS = 64
UNSUPPORTED_TYPE = "is not supported by this server, with any model"
"""End of the error message for a field, or a value of `type`, that is not supported."""


class _Error(msgspec.Struct, frozen=True, gc=False):
    type: str
    loc: tuple[str | int, ...]
    msg: str
    input: Any


def build_unsupported(param: str, instead_of: Mapping[str, str] = _NOTHING, why: str = "") -> Problem:
    """Return the 400 problem for a field that is not supported with any model.

    `instead_of` has the alternatives to fields, which the message includes. `why` replaces the default text before the
    alternative; empty for the default.
    """
    text = why or f"{param} {UNSUPPORTED_TYPE}"
    instead = instead_of.get(param.rpartition(".")[2], "")
    return build_invalid(f"{text}: {instead}" if instead else text, param, RefusalCode.UNSUPPORTED.value)


def from_validation(error: ValidationError, known: Collection[str], instead: Mapping[str, str]) -> Problem:
    """Return one 400 problem for the errors of a body.

    `known` are the names of all fields of the body, for a hint about an unknown field. `instead` has the alternatives
    to unsupported fields.
    """
    errors = _list_errors(error)
    later = next((problem for detail in errors if (problem := _check_unsupported(detail, instead)) is not None), None)
    if later is not None:
        return later
    first = errors[0]
    if first.type == "extra_forbidden":
        return _build_unknown(first.loc, known)
    path = _render_path(first.loc)
    return build_invalid(f"{path}: {first.msg}", path)


def has_only_unknown_fields(error: ValidationError) -> bool:
    """Return whether the only errors of a body are unknown fields that may be ignored.

    Fields of the prompt, fields of the answer's format, and fields for unsupported features such as audio are never
    ignored.
    """
    return all(cause.type == "extra_forbidden" and _is_ignorable(cause.loc) for cause in _list_errors(error))


def _is_ignorable(loc: tuple[str | int, ...]) -> bool:
    if loc[-1] in _LATER:
        return False
    if len(loc) == 1:
        return loc[0] not in _QUESTIONS
    if len(loc) == 2 and loc[0] in _WITH_FORMS:  # an option of another kind, unless it is a typing error
        name = str(loc[1])
        return "format" not in name and not difflib.get_close_matches(name, ("format", "schema", "type"), 1, 0.7)
    return loc[0] not in _FORMS


def _list_errors(error: ValidationError) -> list[_Error]:
    return [
        _Error(cause["type"], cause["loc"], cause["msg"], cause["input"])
        for cause in error.errors(include_url=False, include_context=False)
    ]


def _check_unsupported(error: _Error, instead: Mapping[str, str]) -> Problem | None:
    """Return a 400 problem for an error about a feature that is not supported; None for any other error."""
    path = _render_path(error.loc)
    if error.loc[-1] in _LATER:
        return build_unsupported(path, instead)
    if error.loc[-1] == "type" and error.type == "literal_error" and isinstance(error.input, str):
        why = f"{path} {error.input[:_MAX_VALUE_CHARS]!r} {UNSUPPORTED_TYPE}"
        return build_unsupported(path, instead, why)
    return None


def _build_unknown(loc: tuple[str | int, ...], known: Collection[str]) -> Problem:
    name = str(loc[-1])[:_MAX_VALUE_CHARS]
    near = difflib.get_close_matches(name, known, 1, 0.7) if len(loc) == 1 else []
    hint = f": did you mean {near[0]}?" if near else ""
    return build_invalid(f"unknown field {name!r}{hint}", _render_path(loc)[:128])


def _render_path(loc: tuple[str | int, ...]) -> str:
    """Return the path of an error, such as `messages[0].content[1].text`.

    The tags of union branches and pydantic's step `[key]` are omitted. The tags of parts end in `_part`, and no field
    does.
    """
    path = ""
    before: str | int = ""
    for step in loc:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step != "[key]" and not _is_tag(step, before):
            path += f".{step[:_MAX_VALUE_CHARS]}" if path else step[:_MAX_VALUE_CHARS]
        before = step
    return path


def _is_tag(step: str, before: str | int) -> bool:
    return step.endswith("_part") or (step in _TAGS and (before in _TAGGED or isinstance(before, int)))
