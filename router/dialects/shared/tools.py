"""Tools that a model may call, in the common form of all dialects: functions in OpenAI's JSON, in their order.

A client offers functions, custom tools (their input is a text), and namespaces that group both. A model only gets
functions. A custom tool becomes a function with the one parameter `input`, and its calls are converted back. Tools of
any other type (`web_search`, `local_shell`, `mcp`, ...) would have to run on the server. They are left out and named in
the answer; `router.unknown_fields = "refuse"` makes them a 400.
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
"""Schema of a function without parameters; templates require a schema."""
INPUT: Body = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
"""Schema of a custom tool's input."""
MAX_FUNCTION_NAME_CHARS = 128
_FUNCTION = frozenset({"name", "description", "parameters", "strict"})


class ClientTool(NamedTuple):
    """Tool as its client knows it, if that differs from the function that the model gets."""

    name: str
    custom: bool = False
    """Whether the tool is a custom tool, whose input is a text."""
    namespace: str = ""
    """Name of the tool's namespace; empty without one."""


class OfferedTool(NamedTuple):
    """Tool of a request as the model gets it."""

    body: Body
    """Function in OpenAI's JSON."""
    strict: bool = False
    """Whether the arguments of a call must follow the schema."""
    origin: ClientTool | None = None
    """Tool as its client knows it; None if that is the same function."""

    @property
    def name(self) -> str:
        """Name of the function."""
        return str(self.body["function"]["name"])


class ToolSet(NamedTuple):
    """All tools of a request, as `collect_tools` returns them."""

    text: str = ""
    """JSON of the functions for `wire.frames.Generate`; empty if the prompt contains none."""
    names: tuple[str, ...] = ()
    """Names of the functions."""
    strict: bool = False
    """Whether the arguments of at least one tool must follow its schema."""
    origins: Mapping[str, ClientTool] = {}
    """Tools that the client knows in another form, by function name."""
    left_out: tuple[str, ...] = ()
    """Tools that were left out, as `path=type`."""


NO_TOOLS = ToolSet()


def build_function(name: str, description: object = None, parameters: object = None, **more: object) -> Body:
    """Return a function in OpenAI's shape.

    `more` are further members, such as `strict`. Members that are None are left out, except `parameters`, whose default
    is the schema without parameters.
    """
    named = {"name": name, "description": description, **more}
    named["parameters"] = NO_PARAMETERS if parameters is None else parameters
    return {"type": "function", "function": {key: value for key, value in named.items() if value is not None}}


def build_custom_function(name: str, description: str | None, form: TextFormat | GrammarFormat | None) -> Body:
    """Return a custom tool as a function with the one text parameter `input`.

    `form` is the format of the input; None: any text. A grammar becomes a part of the description, and is not enforced.
    """
    texts = [description] if description else []
    if isinstance(form, GrammarFormat):
        texts.append(f"The input follows this {form.syntax} grammar:\n{form.definition}")
    return build_function(name, "\n\n".join(texts) or None, INPUT)


def clean_function(tool: Body) -> Body:
    """Return a function of a body in OpenAI's shape without unknown members and members that are null.

    A missing schema becomes `NO_PARAMETERS`. Keys keep their order, because templates print them.
    """
    fields = {key: value for key, value in tool["function"].items() if value is not None and key in _FUNCTION}
    return {"type": "function", "function": {**fields, "parameters": fields.get("parameters", NO_PARAMETERS)}}


def render_omitted_part(kind: str) -> str:
    """Return the text for a part of a tool's result that is no text, such as an image. `kind` is its type.

    An agent does not know the models of this cluster, and sends such a result again in each request of its
    conversation.
    """
    return f"[{kind[:64]} omitted: the model gets only text]"


def build_omitted_problem(where: str) -> Problem:
    """Build the 400 problem for a part that is no text, with `router.unknown_fields = "refuse"`.

    `where` is the path and type of the part.
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
    """Check and combine the tools of a request: the functions `offered`, and the tools in `foreign` for a server.

    Return a 400 problem for more than `MAX_TOOLS` functions, and if `encode_json` refuses their JSON, for example above
    `MAX_TOOLS_BYTES`. With `strict`, return one for the first tool that would have to run on a server. Otherwise list
    such tools in `ToolSet.left_out`.

    A function whose name is taken gets the name of its namespace as a prefix, if it has one. Without `include_text`,
    `ToolSet.text` is empty, so that the prompt contains no tools. Only tools with a name in `allowed` are
    included; None: all tools. A name in `allowed` without a tool is a 400 problem.
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
    """Add the namespace as a prefix to a tool whose name is already taken."""
    names: set[str] = set()
    for tool in offered:
        origin, name = tool.origin, tool.name
        if origin is not None and origin.namespace and name in names:
            name = f"{origin.namespace}__{name}"[:MAX_FUNCTION_NAME_CHARS]
        names.add(name)
        yield tool._replace(body=tool.body | {"function": tool.body["function"] | {"name": name}})


def decode_input(call: AnswerToolCall) -> str:
    """Return the input of a call to a custom tool: the text `input` of its arguments, a JSON object.

    Arguments of another shape are returned unchanged.
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
