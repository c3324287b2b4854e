"""`python -m tests.clients.agent`: a coding agent's traffic through both official libraries, written to docs/agent.md.

The session has a pool of two nodes with the embedded model, a long system prompt, tools, and many turns. Each answer is
a call; the next request has the conversation up to the result of that call. The model cannot program. Every call is
therefore requested by name, and the schemas of the tools leave little choice. The page shows the traffic, not the
quality of a model.
"""

import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from openai import DefaultHttpxClient, OpenAI

from tests.support.cluster.engine_pool import MLX
from tests.support.processes import ROOT, Pool, pool

PAGE = ROOT / "docs" / "agent.md"
MODEL = "macpool-tiny"
FILES = {
    "greet.py": 'def greet(name):\n    return "Hullo, " + name\n',
    "test_greet.py": 'from greet import greet\n\n\ndef test_greet():\n    assert greet("Ada") == "Hello, Ada"\n',
    "README.md": "# greet\n\nSays hello, politely.\n",
}
RULES = (
    "Read a file before you change it.",
    "Change as little as possible.",
    "Run the tests after each change.",
    "Keep to the style of the file at hand.",
    "Names are whole words.",
    "Functions are short, and do one thing.",
    "Never touch what nobody asked for.",
    "Say what you did in one sentence, and stop.",
    "Errors are told, never hidden.",
    "A test that fails is read before anything is changed.",
)
SYSTEM = "You are a coding agent. You work in a folder by calling tools, one at a time.\n\n" + "\n".join(
    f"{number}. {RULES[number % len(RULES)]} This is rule {number} of {section}."
    for section in ("reading", "writing", "testing", "telling")
    for number in range(1, 21)
)
TASK = "The test of greet fails. Find out why, and mend it."
_PATH = {"enum": sorted(FILES)}
_COUNT = {"type": "integer", "minimum": 0, "maximum": 9}


def _tool(name: str, description: str, **properties: Any) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"name": name, "description": description, "parameters": schema}


TOOLS = (
    _tool("list_files", "List the files of the folder."),
    _tool("read_file", "Give a file's text.", path=_PATH),
    _tool("search", "Find a word in all files.", word={"enum": ["greet", "Hello", "Hullo"]}),
    _tool(
        "edit_file",
        "Put one word in the place of another.",
        path={"const": "greet.py"},
        old={"const": "Hullo"},
        new={"const": "Hello"},
    ),
    _tool("run_tests", "Run the tests.", verbose={"type": "boolean"}),
    _tool(
        "note",
        "Keep a note for later.",
        about={"enum": ["cause", "change", "result"]},
        line=_COUNT,
    ),
)
STEPS = (
    "list_files",
    "run_tests",
    "read_file",
    "search",
    "read_file",
    "note",
    "edit_file",
    "run_tests",
    "edit_file",
    "run_tests",
    "read_file",
    "note",
    "run_tests",
)
REPORT = {
    "type": "object",
    "properties": {"done": {"type": "boolean"}, "files": _COUNT},
    "required": ["done", "files"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Turn:
    """One request and its answer. `call` is a tool's name, empty for the report at the end."""

    call: str
    said: str
    prompt: int
    cached: int
    written: int
    node: str
    first: float
    """Seconds to the first event."""


@dataclass(slots=True)
class Folder:
    """The files that the tools work on."""

    files: dict[str, str] = field(default_factory=lambda: dict(FILES))

    def run(self, name: str, arguments: dict[str, Any]) -> str:
        """Carry out a call, and return its result for the model."""
        match name:
            case "list_files":
                return "\n".join(sorted(self.files))
            case "read_file":
                return self.files[arguments["path"]]
            case "search":
                word = arguments["word"]
                hits = [f"{path}: {text.count(word)}" for path, text in self.files.items() if word in text]
                return "\n".join(hits) or "nothing"
            case "edit_file":
                path, old = arguments["path"], arguments["old"]
                changed = old in self.files[path]
                self.files[path] = self.files[path].replace(old, arguments["new"])
                return "changed" if changed else f"there is no {old} in {path}"
            case "run_tests":
                return "1 passed" if "Hello" in self.files["greet.py"] else "1 failed: 'Hullo, Ada' != 'Hello, Ada'"
            case _:
                return "kept"


def with_openai(made: Pool, steps: tuple[str, ...], events: list[str]) -> Iterator[Turn]:
    """Run the session with OpenAI's library; `events` gets those of the second turn."""
    client, folder = (
        OpenAI(
            base_url=made.facts["base_url"],
            api_key=made.key,
            max_retries=0,
            http_client=DefaultHttpxClient(trust_env=False, verify=made.trust),
        ),
        Folder(),
    )
    tools: Any = [{"type": "function", "function": {**tool, "strict": True}} for tool in TOOLS]
    messages: Any = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TASK}]
    for turn, name in enumerate([*steps, ""]):
        begun, first, text, calls, usage = time.monotonic(), 0.0, "", dict[int, Any](), None
        chosen: Any = (
            {"tool_choice": {"type": "function", "function": {"name": name}}}
            if name
            else {
                "tool_choice": "none",
                "response_format": {"type": "json_schema", "json_schema": {"name": "report", "schema": REPORT}},
            }
        )
        raw = client.chat.completions.with_raw_response.create(
            model=MODEL,
            messages=messages,
            tools=tools,
            stream=True,
            stream_options={"include_usage": True},
            max_tokens=300,
            temperature=0,
            prompt_cache_key="agent-1",
            parallel_tool_calls=False,
            **chosen,
        )
        for chunk in raw.parse():
            first = first or time.monotonic() - begun
            if turn == 1:
                events.append(chunk.model_dump_json(exclude_unset=True))
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                for part in choice.delta.tool_calls or []:
                    calls[part.index] = part
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        call = calls.get(0)
        said = call.function.arguments if call else json.dumps(json.loads(text))
        cached = usage.prompt_tokens_details.cached_tokens or 0
        yield Turn(
            name, said, usage.prompt_tokens, cached, usage.completion_tokens, raw.headers["x-macpool-node"], first
        )
        if call:
            told = {"name": call.function.name, "arguments": said}
            asked: Any = [{"id": call.id, "type": "function", "function": told}]
            messages += [
                {"role": "assistant", "content": None, "tool_calls": asked},
                {"role": "tool", "tool_call_id": call.id, "content": folder.run(name, json.loads(said))},
            ]


def with_anthropic(made: Pool, steps: tuple[str, ...], events: list[str]) -> Iterator[Turn]:
    """Run the session with Anthropic's library; `events` gets those of the second turn."""
    from anthropic import Anthropic  # takes 2 s of CPU, which a test of the other names would spend

    client, folder = (
        Anthropic(
            base_url=made.base,
            api_key=made.key,
            max_retries=0,
            http_client=httpx2.Client(trust_env=False, verify=made.trust),
        ),
        Folder(),
    )
    tools: Any = [
        {"name": one["name"], "description": one["description"], "input_schema": one["parameters"], "strict": True}
        for one in TOOLS
    ]
    messages: Any = [{"role": "user", "content": TASK}]
    for turn, name in enumerate([*steps, ""]):
        begun, first, text, written, start, block = time.monotonic(), 0.0, "", 0, None, None
        chosen: Any = (
            {"tool_choice": {"type": "tool", "name": name, "disable_parallel_tool_use": True}}
            if name
            else {
                "tool_choice": {"type": "none"},
                "output_config": {"format": {"type": "json_schema", "schema": REPORT}},
            }
        )
        raw = client.messages.with_raw_response.create(
            model=MODEL,
            system="You are careful. " + SYSTEM,
            messages=messages,
            tools=tools,
            stream=True,
            max_tokens=300,
            extra_body={"temperature": 0},
            extra_headers={"x-session-id": "agent-2"},
            **chosen,
        )
        for event in raw.parse():
            first = first or time.monotonic() - begun
            if turn == 1:
                events.append(f"{event.type}: {event.model_dump_json(exclude_unset=True, exclude={'type'})}")
            if event.type == "message_start":
                start = event.message.usage
            elif event.type == "content_block_start" and event.content_block.type == "tool_use":
                block = event.content_block
            elif event.type == "content_block_delta":
                text += getattr(event.delta, "partial_json", "") or getattr(event.delta, "text", "")
            elif event.type == "message_delta":
                start, written = event.usage, event.usage.output_tokens
        assert start is not None
        cached = start.cache_read_input_tokens or 0
        said = json.dumps(json.loads(text or "{}"))
        yield Turn(
            name, said, (start.input_tokens or 0) + cached, cached, written, raw.headers["x-macpool-node"], first
        )
        if block:
            arguments = json.loads(text or "{}")
            called = {"type": "tool_use", "id": block.id}
            result = {"type": "tool_result", "tool_use_id": block.id}
            messages += [
                {"role": "assistant", "content": [{**called, "name": name, "input": arguments}]},
                {"role": "user", "content": [{**result, "content": folder.run(name, arguments)}]},
            ]


SESSIONS = {"openai": with_openai, "anthropic": with_anthropic}


# the page

HEAD = """# A coding agent's traffic
<!-- Written by `python -m tests.clients.agent`. Do not edit. -->

Most of each request of an agent repeats the previous one: a long system prompt, tools, and a conversation. Each turn
adds a call and its result. This page shows one session with each official library, streamed, on a pool of two nodes.
The model is `macpool-tiny` from the package, on the CPU of a busy Linux machine. This model cannot program. Each call
is therefore requested by name (`tool_choice`), with strict tools. The report at the end has no tools and follows a JSON
schema. The tables show:

- The prompt tokens of every turn, and how many of them came from the [prefix cache](models.md#the-prefix-cache). From
  the second turn on, the cache has all prompt tokens except the last ones.
- The conversation stays on the Mac that has its prefix. It is identified by `prompt_cache_key` with the first library,
  and by `x-session-id` with the second. Only the report may go to any Mac, because its prompt has no tools and differs.
- A call is sent in one piece when it is complete, with arguments that match its schema.

To see this with your own model, connect your agent to the pool ([clients](clients.md)) and run `cluster explain`.
"""


def section(title: str, turns: list[Turn], events: list[str]) -> str:
    """Return the part of the page about one library's session."""
    rows = "\n".join(
        f"| {at} | {one.prompt:,} | {one.cached:,} | {one.written} | {one.first:.2f} s | {one.node} | "
        f"{f'`{one.call}` ' if one.call else 'report '}`{one.said}` |"
        for at, one in enumerate(turns, 1)
    )
    prompt, cached = sum(one.prompt for one in turns), sum(one.cached for one in turns)
    shown = "\n".join(shortened(event) for event in events)
    return (
        f"\n## Through `{title}`\n"
        "| turn | prompt tokens | cached tokens | generated tokens | first event after | Mac | answer |\n"
        f"|---|---|---|---|---|---|---|\n{rows}\n\n"
        f"{prompt:,} prompt tokens, of which {100 * cached // prompt} % came from the cache.\n"
        f"\nThe events of the second turn, with shortened identifiers:\n\n```\n{shown}\n```\n"
    )


def shortened(event: str) -> str:
    """Remove the parts that differ each time."""
    event = re.sub(r'"(call|chatcmpl|msg|toolu)[-_][A-Za-z0-9_-]+"', r'"\1_…"', event)
    return re.sub(r'"created":\d+', '"created":…', event)


def sessions(made: Pool, steps: tuple[str, ...] = STEPS) -> dict[str, tuple[list[Turn], list[str]]]:
    """Run the session with each library."""
    found: dict[str, tuple[list[Turn], list[str]]] = {}
    for name, session in SESSIONS.items():
        events: list[str] = []
        found[name] = list(session(made, steps, events)), events
    return found


def main() -> int:
    """Start a pool, run the sessions, write the page."""
    with tempfile.TemporaryDirectory(prefix="mp-") as folder, pool(Path(folder)) as made:
        made.up()
        for name in ("mini", "studio"):
            made.join(name, *MLX)
        text = HEAD + "".join(section(name, *found) for name, found in sessions(made).items())
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
