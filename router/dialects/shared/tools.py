"""Tools that a model may call, in the common form of all dialects: functions as JSON in OpenAI's format, in order.

A client offers functions, custom tools (whose input is a text), and namespaces that group both. A model gets only
functions. A custom tool becomes a function with the single parameter `input`, and its calls are converted back. Tools
of any other type (`web_search`, `local_shell`, `mcp`, ...) would have to run on the server. They are omitted, and named
in the answer. With `router.unknown_fields = "refuse"`, they give a 400 problem instead.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from router.admission.request_limits import MAX_TOOLS, MAX_TOOLS_BYTES
from router.dialects.shared.common_fields import ForeignPart, GrammarFormat, TextFormat
from router.dialects.shared.strict_json import Body, encode_json
from router.dialects.shared.tool_calls import AnswerToolCall
from router.dialects.shared.validation import build_unsupported
from router.errors import Problem, build_invalid

NO_PARAMETERS: Body = {"type": "object", "properties": {}}
"""Schema of a function without parameters. Templates require a schema."""
INPUT: Body = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
"""Schema of the parameters of a custom tool, as a function."""
MAX_FUNCTION_NAME_CHARS = 128
_FUNCTION = frozenset({"name", "description", "parameters", "strict"})


class ClientTool(NamedTuple):
    """Tool in the client's own form, if that differs from the function that the model gets."""

    name: str
    custom: bool = False
    """Whether the tool is a custom tool, whose input is a text."""
    namespace: str = ""
    """Name of the tool's namespace; empty if it has none."""


class OfferedTool(NamedTuple):
    """Tool of a request as the model gets it."""

    body: Body
    """Function as JSON in OpenAI's format."""
    strict: bool = False
    """Whether the arguments of a call must follow the schema."""
    origin: ClientTool | None = None
    """Tool in the client's own form; None if that is the same function."""

    @property
    def name(self) -> str:
        """Name of the function."""
        return str(self.body["function"]["name"])


class ToolSet(NamedTuple):
    """All tools of a request, as `collect_tools` returns them."""

    text: str = ""
    """JSON of the functions for `wire.frames.Generate`; empty if the prompt contains no tools."""
    names: tuple[str, ...] = ()
    """Names of the functions."""
    strict: bool = False
    """Whether the arguments of at least one tool must follow its schema."""
    origins: Mapping[str, ClientTool] = {}
    """Tools whose form at the client differs from the function, by the name of the function."""
    left_out: tuple[str, ...] = ()
    """Tools that were omitted, as `path=type`."""


NO_TOOLS = ToolSet()


def build_function(name: str, description: object = None, parameters: object = None, **more: object) -> Body:
    """Return a function as JSON in OpenAI's format.

    `more` are further members, such as `strict`. Members that are None are omitted, except `parameters`, whose default
    is `NO_PARAMETERS`.
    """
    named = {"name": name, "description": description, **more}
    named["parameters"] = NO_PARAMETERS if parameters is None else parameters
    return {"type": "function", "function": {key: value for key, value in named.items() if value is not None}}


def build_custom_function(name: str, description: str | None, form: TextFormat | GrammarFormat | None) -> Body:
    """Return a custom tool as a function with the single text parameter `input`.

    `form` is the format of the input; None for any text. A grammar becomes a part of the description, and is not
    enforced.
    """
    texts = [description] if description else []
    if isinstance(form, GrammarFormat):
        texts.append(f"The input follows this {form.syntax} grammar:\n{form.definition}")
    return build_function(name, "\n\n".join(texts) or None, INPUT)


def clean_function(tool: Body) -> Body:
    """Return a function of a body in OpenAI's format, without its unknown members and without members that are null.

    A missing schema becomes `NO_PARAMETERS`. Keys keep their order, because templates print them.
    """
    fields = {key: value for key, value in tool["function"].items() if value is not None and key in _FUNCTION}
    return {"type": "function", "function": {**fields, "parameters": fields.get("parameters", NO_PARAMETERS)}}


def render_omitted_part(kind: str) -> str:
    """Return the note that replaces a part of a tool result that is not text, such as an image. `kind` is its type.

    Such a part is not refused, because an agent sends the result again in each request of its conversation.
    """
    return f"[{kind[:64]} omitted: the model gets only text]"


def build_omitted_problem(where: str) -> Problem:
    """Return the 400 problem for a part that is not text, for `router.unknown_fields = "refuse"`.

    `where` is the path and the type of the part, as `path=type`.
    """
    return build_unsupported(where[:128], why=f"{where[:128]} is not supported: models get only text")


def find_server_tools(tools: Sequence[object] | None, path: str = "tools") -> Iterator[tuple[str, str]]:
    """Yield the tools that would have to run on a server, including those in namespaces, as (path, type)."""
    for at, tool in enumerate(tools or ()):
        if isinstance(tool, ForeignPart):
            yield f"{path}[{at}].type", tool.type
        yield from find_server_tools(getattr(tool, "tools", None), f"{path}[{at}].tools")


def collect_tools(
    offered: Iterable[OfferedTool],
    foreign: Sequence[object] | None,
    *,
    strict: bool,
    include_text: bool = True,
    allowed: frozenset[str] | None = None,
) -> ToolSet | Problem:
    """Check the tools of a request, and return them as a set.

    `offered` are the functions for the model. Only those with a name in `allowed` are included; None for all. A
    function whose name is taken gets the name of its namespace as a prefix, if it has a namespace. Unless
    `include_text`, `ToolSet.text` is empty, so that the prompt contains no tools.

    `foreign` are the tools of the body, including those that would have to run on a server; None for none. `strict`
    refuses the first tool for a server with a 400 problem. Otherwise `ToolSet.left_out` lists such tools.

    Return a 400 problem also for more than `MAX_TOOLS` functions, and for a name in `allowed` without a tool. Return it
    also if `encode_json` refuses the JSON of the functions, for example above `MAX_TOOLS_BYTES`.
    """
    without = tuple(find_server_tools(foreign))
    if strict and without:
        where, kind = without[0]
        why = f"{where} {kind[:64]!r} is not supported: tools cannot run on this server"
        return build_unsupported(where, why=why)
    if allowed is not None:
        offered = [tool for tool in offered if tool.name in allowed]
        missing = allowed - {tool.name for tool in offered}
        if missing:
            return build_invalid(f"tool_choice names {min(missing)}, which is not in tools", "tool_choice")
    tools = list(_make_distinct(offered))
    if len(tools) > MAX_TOOLS:
        return build_invalid(f"{len(tools)} tools in the request, the limit is {MAX_TOOLS}: leave some out", "tools")
    text = encode_json([tool.body for tool in tools], "tools", MAX_TOOLS_BYTES) if tools else ""
    if isinstance(text, Problem):
        return text
    origins = {tool.name: tool.origin for tool in tools if tool.origin is not None}
    names = tuple(tool.name for tool in tools)
    return ToolSet(
        text if include_text else "",
        names,
        any(tool.strict for tool in tools),
        origins,
        tuple(f"{where}={kind}" for where, kind in without),
    )


def _make_distinct(offered: Iterable[OfferedTool]) -> Iterator[OfferedTool]:
    """Yield the tools. A tool whose name is already taken gets its namespace, if it has one, as a prefix."""
    names: set[str] = set()
    for tool in offered:
        origin, name = tool.origin, tool.name
        if origin is not None and origin.namespace and name in names:
            name = f"{origin.namespace}__{name}"[:MAX_FUNCTION_NAME_CHARS]
        names.add(name)
        yield tool._replace(body=tool.body | {"function": tool.body["function"] | {"name": name}})


def decode_input(call: AnswerToolCall) -> str:
    """Return the input of a call of a custom tool, which is the text `input` in the JSON object of its arguments.

    Arguments of any other form are returned unchanged.
    """
    try:
        return msgspec.json.decode(call.arguments, type=_Input).input
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return call.arguments


def encode_input(text: str) -> str:
    """Return the input of a custom tool as JSON arguments of its function."""
    return msgspec.json.encode(_Input(text)).decode()


class _Input(msgspec.Struct):
    input: str
