"""Conversion of a chat body's messages to those of a Generate frame.

A tool message must name its call, but the call may be missing from the conversation. Clients cut long histories at any
place, and a model understands a result without its call. A field that has no meaning in a message of that role is
refused, unless it is empty. Client libraries write all fields of one class into every message.
"""

from router.dialects.openai.chat_schema import ChatMessage, MessageCustomCall, MessageToolCall, TextPart
from router.dialects.openai.chat_schema import Part as ContentPart
from router.dialects.shared.tools import arguments_for
from router.errors import Problem, invalid
from wire.frames import Message, ToolCall

_ONLY = (
    ("tool_calls", "assistant"),
    ("reasoning_content", "assistant"),
    ("reasoning", "assistant"),
    ("refusal", "assistant"),
    ("annotations", "assistant"),
    ("tool_call_id", "tool"),
)


def messages_of(found: list[ChatMessage]) -> tuple[Message, ...] | Problem:
    """Convert the messages of a chat body, or return a 400 problem with the path of a missing or surplus field."""
    messages: list[Message] = []
    for index, message in enumerate(found):
        wrong = _wrong(message, f"messages[{index}]")
        if wrong is not None:
            return wrong
        messages.append(_message(message))
    return tuple(messages)


def _wrong(message: ChatMessage, path: str) -> Problem | None:
    role = message.role
    for name, only in _ONLY:
        if role != only and getattr(message, name):
            return invalid(f"only messages with the role {only} can have {name}", f"{path}.{name}")
    if role == "tool" and not message.tool_call_id:
        return invalid("a tool message needs the tool_call_id of its tool call", f"{path}.tool_call_id")
    if message.content is None and not _says_without(message):
        kind = (
            "an assistant message needs content or tool_calls"
            if role == "assistant"
            else f"a {role} message needs content"
        )
        return invalid(kind, f"{path}.content")
    return None


def _says_without(message: ChatMessage) -> bool:
    return bool(message.tool_calls or message.refusal or message.reasoning_content or message.reasoning)


def _message(message: ChatMessage) -> Message:
    return Message(
        message.role,
        _text(message.content) + (message.refusal or ""),
        message.name or "",
        tuple(_call(call) for call in message.tool_calls or ()),
        message.tool_call_id or "",
        message.reasoning_content or message.reasoning or "",
    )


def _call(call: MessageToolCall | MessageCustomCall) -> ToolCall:
    if isinstance(call, MessageCustomCall):
        return ToolCall(call.id, call.custom.name, arguments_for(call.custom.input))
    return ToolCall(call.id, call.function.name, call.function.arguments)


def _text(content: str | list[ContentPart] | None) -> str:
    if isinstance(content, list):
        return "".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)
    return content or ""
