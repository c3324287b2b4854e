"""Tools that a model may call, as every dialect writes them in the end: functions in OpenAI's JSON, in their order.

A client offers functions, custom tools (their input is a text), and namespaces that group both. A model is offered
functions alone: a custom tool becomes a function with the one parameter `input`, and its calls are turned back. Tools
of any other type (`web_search`, `local_shell`, `mcp`, ...) would have to run on the server. They are left out, and
named in the answer; `router.unknown_fields = "refuse"` makes them a 400.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from router.admission.request_limits import MOST_TOOLS, TOOLS_BYTES
from router.dialects.shared.common_fields import Foreign, GrammarFormat, TextFormat
from router.dialects.shared.strict_json import Body, write
from router.dialects.shared.tool_calls import Call
from router.dialects.shared.validation import unsupported
from router.errors import Problem, invalid

NO_PARAMETERS: Body = {"type": "object", "properties": {}}
"""What a function without parameters takes; templates look for them."""
INPUT: Body = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
"""What a custom tool takes."""
LONGEST_FUNCTION_NAME = 64
_FUNCTION = frozenset({"name", "description", "parameters", "strict"})


class Origin(NamedTuple):
    """A tool as its client knows it, where that differs from the function that the model is offered."""

    name: str
    custom: bool = False
    namespace: str = ""


class Offered(NamedTuple):
    """One tool as the model is offered it. `origin` is None where the client knows it as the same function."""

    body: Body
    strict: bool = False
    origin: Origin | None = None

    @property
    def name(self) -> str:
        """The function's name."""
        return str(self.body["function"]["name"])


class Tools(NamedTuple):
    """All tools of a request: the text of `wire.frames.Generate`, their names, whether one is strict, those that the
    client knows otherwise, and those that were left out."""

    text: str = ""
    names: tuple[str, ...] = ()
    strict: bool = False
    origins: Mapping[str, Origin] = {}
    left_out: tuple[str, ...] = ()


NO_TOOLS = Tools()


def function(name: str, description: object = None, parameters: object = None, **more: object) -> Body:
    """Return one function; what is None is left out."""
    named = {"name": name, "description": description, **more}
    named["parameters"] = NO_PARAMETERS if parameters is None else parameters
    return {"type": "function", "function": {key: value for key, value in named.items() if value is not None}}


def custom(name: str, description: str | None, form: TextFormat | GrammarFormat | None) -> Body:
    """Return the function of a custom tool; a grammar of its input is told to the model and not enforced."""
    told = [description] if description else []
    if isinstance(form, GrammarFormat):
        told.append(f"The input follows this {form.syntax} grammar:\n{form.definition}")
    return function(name, "\n\n".join(told) or None, INPUT)


def as_written(tool: Body) -> Body:
    """Return a function in OpenAI's shape without its empty and unknown parts; its keys keep their order: templates
    print them."""
    given = {key: value for key, value in tool["function"].items() if value is not None and key in _FUNCTION}
    return {"type": "function", "function": {**given, "parameters": given.get("parameters", NO_PARAMETERS)}}


def left_out(tools: Sequence[object] | None, path: str = "tools") -> Iterator[tuple[str, str]]:
    """Find the tools that would have to run on a server, also in namespaces: where each one stands, and its type."""
    for at, one in enumerate(tools or ()):
        if isinstance(one, Foreign):
            yield f"{path}[{at}].type", one.type
        yield from left_out(getattr(one, "tools", None), f"{path}[{at}].tools")


def gathered(
    offered: Iterable[Offered], foreign: Sequence[object] | None, *, strict: bool, told: bool = True
) -> Tools | Problem:
    """Put the tools of a request together; checked, but without text, where the model is not `told` of them."""
    without = tuple(left_out(foreign))
    if strict and without:
        where, kind = without[0]
        why = f"{where} {kind[:64]!r} is not offered by this server, with any model: it would have to run here"
        return unsupported(where, why=why)
    found = list(_distinct(offered))
    if len(found) > MOST_TOOLS:
        return invalid(f"{len(found)} tools are offered in all, at most {MOST_TOOLS} are taken", "tools")
    text = write([one.body for one in found], "tools", TOOLS_BYTES) if found else ""
    if isinstance(text, Problem):
        return text
    origins = {one.name: one.origin for one in found if one.origin is not None}
    names = tuple(one.name for one in found)
    return Tools(text if told else "", names, any(one.strict for one in found), origins,
                 tuple(f"{where}={kind}" for where, kind in without))  # fmt: skip


def _distinct(offered: Iterable[Offered]) -> Iterator[Offered]:
    """Put the namespace before the name of a tool whose name another one has already."""
    seen: set[str] = set()
    for one in offered:
        origin, name = one.origin, one.name
        if origin is not None and origin.namespace and name in seen:
            name = f"{origin.namespace}__{name}"[:LONGEST_FUNCTION_NAME]
        seen.add(name)
        yield one._replace(body=one.body | {"function": one.body["function"] | {"name": name}})


def input_of(call: Call) -> str:
    """Return the input of a call of a custom tool; arguments of another shape are given as they are."""
    try:
        return msgspec.json.decode(call.arguments, type=_Input).input
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return call.arguments


def arguments_for(text: str) -> str:
    """Return the arguments with which a model called the function of a custom tool."""
    return msgspec.json.encode(_Input(text)).decode()


class _Input(msgspec.Struct):
    input: str
