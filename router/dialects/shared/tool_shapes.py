"""Conversion of tools, and of the arguments of calls, between the formats of the dialects.

In chats and Ollama's routes, the name of a function is in a member `function`. In `/v1/responses`, it is next to
`type`. In `/v1/messages`, the schema is called `input_schema`. Agents that use several routes mix these formats, and
some omit `type`. Each route therefore accepts all of them.
"""

from typing import Annotated, Any, cast

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from router.admission.request_limits import MAX_TOOLS_BYTES
from router.dialects.shared.strict_json import Body, encode_json, read_object
from router.errors import Problem

_INNER = frozenset({"name", "description", "parameters", "strict", "format"})
"""Members of a function or custom tool that chats have within the member `function` or `custom`."""


def extract_member(part: Body, kind: str) -> Body:
    """Return a part in which the members of its object `kind`, such as `function`, replace that object.

    A part without such an object, or with the same member at both levels, is returned unchanged.
    """
    inner = part.get(kind)
    if not isinstance(inner, dict) or inner.keys() & part.keys():
        return part
    return {name: value for name, value in part.items() if name != kind} | cast("Body", inner)


def convert_to_responses(tool: object) -> object:
    """Return a function or custom tool in the format of `/v1/responses`, and any other value unchanged.

    A tool without a type, or with Anthropic's `input_schema`, is a function.
    """
    typed = _complete_type(tool)
    return tool if typed is None else _rename(extract_member(typed, typed["type"]), "input_schema", "parameters")


def convert_to_chat(tool: object) -> object:
    """Return a function or custom tool in the format of chats, and any other value unchanged.

    A tool without a type, or with Anthropic's `input_schema`, is a function.
    """
    typed = _complete_type(tool)
    if typed is None or typed["type"] in typed or "name" not in typed:
        return tool if typed is None else typed
    flat = _rename(typed, "input_schema", "parameters")
    inner = {name: value for name, value in flat.items() if name in _INNER}
    return {name: value for name, value in flat.items() if name not in _INNER} | {flat["type"]: inner}


def convert_to_anthropic(tool: object) -> object:
    """Return a function of another dialect in the format of `/v1/messages`, and any other value unchanged."""
    fields = cast("Body", tool) if isinstance(tool, dict) else {}
    if fields.get("type") != "function" and not {"function", "parameters"} & fields.keys():
        return cast("object", tool)
    flat = cast("Body", convert_to_responses(fields))
    return _rename({name: value for name, value in flat.items() if name != "type"}, "parameters", "input_schema")


def _complete_type(tool: object) -> Body | None:
    """Return a function or custom tool with its type; None for any other value.

    A tool without a type is a function. A tool with Anthropic's `input_schema` is a function as well.
    """
    if not isinstance(tool, dict):
        return None
    fields = cast("Body", tool)
    kind = fields.get("type") or "function"
    if kind not in ("function", "custom"):
        return None
    return fields | {"type": "function" if "input_schema" in fields else kind}


def _rename(part: Body, old: str, new: str) -> Body:
    return part if new in part or old not in part else {new if name == old else name: part[name] for name in part}


def _encode_arguments(arguments: object) -> object:
    if not isinstance(arguments, dict):
        return arguments
    text = encode_json(cast("Body", arguments), "the object", MAX_TOOLS_BYTES)
    if isinstance(text, Problem):
        raise PydanticCustomError("arguments", "{reason}", {"reason": text.message})
    return text


def _decode_arguments(arguments: object) -> object:
    if not isinstance(arguments, str):
        return arguments
    decoded = read_object(arguments.encode()) if arguments else {}
    return arguments if isinstance(decoded, Problem) else decoded


ArgumentsText = Annotated[str, BeforeValidator(_encode_arguments)]
"""Arguments of a call as JSON text. An object, as in Ollama's format, is encoded."""
ArgumentsObject = Annotated[dict[str, Any], BeforeValidator(_decode_arguments)]
"""Arguments of a call as an object. JSON text, as in OpenAI's format, is decoded."""
