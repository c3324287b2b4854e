"""Bodies that clients send: a first question, a chat of nine turns, and a coding agent in the middle of its work."""

import json
from typing import Any

WORDS = "Macs of one household share what they can spare, and the router finds the one with room for it. "

TOOLS = (
    "read_file",
    "write_file",
    "list_files",
    "search",
    "run",
    "patch",
    "test",
    "lint",
    "build",
    "diff",
    "log",
    "ask",
)


def _tool(name: str) -> dict[str, Any]:
    fields = {
        field: {"type": "string", "description": f"The {field} that {name} works on. {WORDS}"}
        for field in ("path", "pattern", "directory", "encoding")
    }
    parameters = {"type": "object", "properties": fields, "required": ["path"], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": WORDS * 5, "parameters": parameters}}


def _step(number: int) -> list[dict[str, Any]]:
    call = {
        "id": f"call_{number}",
        "type": "function",
        "function": {"name": "read_file", "arguments": json.dumps({"path": f"/src/part_{number}.py"})},
    }
    return [
        {"role": "assistant", "content": "I look at the file.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"call_{number}", "content": 'def part(text):\n    return {"a": text}\n' * 28},
    ]


def hello() -> dict[str, Any]:
    """Return a question of two words."""
    return {"messages": [{"role": "user", "content": "hello there"}]}


def chat() -> dict[str, Any]:
    """Return a chat of nine messages, 6.7 KB."""
    turns = [{"role": ("user", "assistant")[turn % 2], "content": WORDS * 7} for turn in range(9)]
    return {"messages": turns, "temperature": 0.7}


def agent() -> dict[str, Any]:
    """Return a request of a coding agent, 30 KB: twelve tools, six of them called."""
    messages = [{"role": "system", "content": WORDS * 30}, {"role": "user", "content": WORDS * 3}]
    for number in range(6):
        messages += _step(number)
    tools = [_tool(name) for name in TOOLS]
    return {"messages": messages, "tools": tools, "tool_choice": "auto", "temperature": 0.2}


BODIES = {"hello": hello, "chat": chat, "agent": agent}
