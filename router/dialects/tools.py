"""Functions that a model may call, as every dialect writes them in the end: OpenAI's JSON, in the client's order."""

from collections.abc import Iterable

from router.dialects.limits import TOOLS_BYTES
from router.dialects.strict_json import Body, write
from router.problems import Problem

NO_PARAMETERS: Body = {"type": "object", "properties": {}}
"""What a function without parameters takes; templates look for them."""


def function(name: str, description: object = None, parameters: object = None, **more: object) -> Body:
    """Give one tool; what is None is left out."""
    named = {"name": name, "description": description, **more}
    named["parameters"] = NO_PARAMETERS if parameters is None else parameters
    return {"type": "function", "function": {key: value for key, value in named.items() if value is not None}}


def as_written(tool: Body) -> Body:
    """Give a tool in OpenAI's shape without its empty parts; its keys keep their order: templates print them."""
    given = {key: value for key, value in tool["function"].items() if value is not None}
    return tool | {"function": {**given, "parameters": given.get("parameters", NO_PARAMETERS)}}


def written(tools: Iterable[Body], *, told: bool = True) -> str | Problem:
    """Write tools as `wire.frames.Generate` has them; checked, but empty, where the model is not to be told of them."""
    text = write(list(tools), "tools", TOOLS_BYTES)
    return "" if isinstance(text, str) and not told else text
