"""Conversion of a chat body's messages to the messages of a `Generate` frame.

A tool message must name its call, but the call may be missing from the conversation. Clients cut long histories at any
place, and a model understands a result without its call. A field of another role (`_ONLY`) is refused, unless it is
empty, because client libraries write all fields of one class into every message. A message of the assistant may be
empty, because some clients store an answer that had only reasoning as `content: null`.
"""

from collections.abc import Sequence
from typing import TypeVar

from router.admission.request_limits import MAX_CALLS
from router.dialects.openai.chat_schema import (
    ChatMessage,
    MessageCustomCall,
    MessageToolCall,
    ReasoningPart,
    RefusalPart,
    ThinkingPart,
    ToolResultPart,
    ToolUsePart,
)
from router.dialects.openai.chat_schema import Part as ContentPart
from router.dialects.shared.common_fields import ForeignPart
from router.dialects.shared.tools import encode_input, render_omitted_part
from router.dialects.shared.validation import UNSUPPORTED_TYPE, build_unsupported
from router.errors import Problem, build_invalid
from wire.frames import Message, ToolCall

P = TypeVar("P", bound=ToolUsePart | ToolResultPart)
_ONLY = (
    ("tool_calls", "assistant"),
    ("reasoning_content", "assistant"),
    ("reasoning", "assistant"),
    ("refusal", "assistant"),
    ("annotations", "assistant"),
    ("tool_call_id", "tool"),
)


def convert_messages(body_messages: list[ChatMessage]) -> tuple[Message, ...] | Problem:
    """Return the messages of a chat body as messages of a frame, or a 400 problem.

    The problem has the path of the first wrong field or part.
    """
    messages: list[Message] = []
    for index, message in enumerate(body_messages):
        wrong = _check_message(message, f"messages[{index}]")
        if wrong is not None:
            return wrong
        messages += _convert_message(message)
    return tuple(messages)


def _check_message(message: ChatMessage, path: str) -> Problem | None:
    role = message.role
    for name, only in _ONLY:
        if role != only and getattr(message, name):
            return build_invalid(f"only messages with the role {only} can have {name}", f"{path}.{name}")
    if role != "tool":
        foreign = _find_foreign_part(message.content, path)
        if foreign is not None:
            return foreign
    for kind, only in ((ToolUsePart, "assistant"), (ToolResultPart, "user")):
        if role != only and _list_parts(message.content, kind):
            return build_invalid(f"only messages with the role {only} can have such parts", f"{path}.content")
    if len(_list_parts(message.content, ToolUsePart)) + len(message.tool_calls or ()) > MAX_CALLS:
        return build_invalid(f"a message has at most {MAX_CALLS} tool calls", f"{path}.content")
    if role != "assistant" and _join_reasoning(message.content):
        return build_invalid("only messages with the role assistant can have reasoning", f"{path}.content")
    if role == "tool" and not message.tool_call_id:
        return build_invalid("a tool message needs the tool_call_id of its tool call", f"{path}.tool_call_id")
    if message.content is None and role not in ("assistant", "tool"):
        return build_invalid(f"a {role} message needs content", f"{path}.content")
    return None


def _find_foreign_part(content: str | list[ContentPart] | None, path: str) -> Problem | None:
    """Return the 400 problem for the first part that is not text, such as an image; None if all parts are text."""
    for at, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, ForeignPart):
            where = f"{path}.content[{at}].type"
            return build_unsupported(where, why=f"{where} {part.type[:64]!r} {UNSUPPORTED_TYPE}")
    return None


def list_omitted_parts(body_messages: list[ChatMessage]) -> list[str]:
    """Return the parts of tool results that are not text, such as images, as `path=type`."""
    parts = [part for message in body_messages if isinstance(message.content, list) for part in message.content]
    within = [part.content for part in parts if isinstance(part, ToolResultPart) and isinstance(part.content, list)]
    named = [f"messages[].content[].type={part.type}" for part in parts if isinstance(part, ForeignPart)]
    inner = [part for content in within for part in content if isinstance(part, ForeignPart)]
    return [*named, *(f"messages[].content[].content[].type={part.type}" for part in inner)]


def _convert_message(message: ChatMessage) -> list[Message]:
    """Return the messages of a frame for a message of a body.

    A message of the user with tool results becomes one message for each result, and one message for its other parts, if
    there are any.
    """
    results = [
        Message("tool", _join_text(part.content), tool_call_id=part.tool_use_id)
        for part in _list_parts(message.content, ToolResultPart)
    ]
    if results and len(results) == len(message.content or ()):
        return results
    used = [ToolCall(part.id, part.name, part.input) for part in _list_parts(message.content, ToolUsePart)]
    converted = Message(
        message.role,
        _join_text(message.content) + (message.refusal or ""),
        message.name or "",
        (*used, *map(_convert_call, message.tool_calls or ())),
        message.tool_call_id or "",
        message.reasoning_content or message.reasoning or _join_reasoning(message.content),
    )
    return [*results, converted]


def _list_parts(content: str | list[ContentPart] | None, kind: type[P]) -> list[P]:
    return [part for part in content if isinstance(part, kind)] if isinstance(content, list) else []


def _convert_call(call: MessageToolCall | MessageCustomCall) -> ToolCall:
    if isinstance(call, MessageCustomCall):
        return ToolCall(call.id, call.custom.name, encode_input(call.custom.input))
    return ToolCall(call.id, call.function.name, call.function.arguments or "")


def _join_text(content: str | Sequence[ContentPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(map(_render_part, content))


def _render_part(part: ContentPart) -> str:
    """Return the text of a part; empty for reasoning, calls and results. A part that is not text becomes a note."""
    if isinstance(part, ThinkingPart | ReasoningPart | ToolUsePart | ToolResultPart):
        return ""
    if isinstance(part, ForeignPart):
        return render_omitted_part(part.type)
    return part.refusal if isinstance(part, RefusalPart) else part.text


def _join_reasoning(content: str | list[ContentPart] | None) -> str:
    """Return the text of all reasoning parts of a content; empty if there are none."""
    if not isinstance(content, list):
        return ""
    return "\n".join(
        part.text if isinstance(part, ReasoningPart) else _join_thinking(part)
        for part in content
        if isinstance(part, ThinkingPart | ReasoningPart)
    )


def _join_thinking(part: ThinkingPart) -> str:
    return part.thinking if isinstance(part.thinking, str) else "".join(text.text for text in part.thinking)
