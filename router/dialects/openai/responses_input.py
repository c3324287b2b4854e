"""Conversion of `/v1/responses` items to messages: consecutive reasoning, text and calls of the model become one
message."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from msgspec.structs import replace

from router.admission.request_limits import MAX_CALLS
from router.dialects.openai.responses_schema import (
    CallItem,
    Content,
    ContentPart,
    CustomCallItem,
    CustomOutputItem,
    InputItem,
    Item,
    MessageItem,
    OutputItem,
    OutputRefusal,
    ToolOutput,
)
from router.dialects.shared.common_fields import ForeignPart
from router.dialects.shared.tools import ClientTool, encode_input, render_omitted_part
from router.errors import Problem, build_invalid
from wire.frames import Message, ToolCall


def convert_items(items: str | Iterable[Item], origins: Mapping[str, ClientTool]) -> list[Message] | Problem:
    """Convert the items of a body to messages. A text is one user message.

    `origins` maps the names of functions to the tools of the client (`ToolSet.origins`). A call of such a tool gets the
    name under which the model is offered the tool.

    Return a 400 problem for more than `MAX_CALLS` consecutive tool calls.
    """
    if isinstance(items, str):
        return [Message("user", items)]
    messages: list[Message] = []
    turn: list[Message] = []
    calls = 0
    offered = {(tool.namespace, tool.name): name for name, tool in origins.items()}
    for at, item in enumerate(items):
        message = _convert_item(item, offered)
        if not _is_same_turn(turn, message, calls):
            messages += _merge_turn(turn)
            turn, calls = [], 0
        turn.append(message)
        calls += len(message.tool_calls)
        if calls > MAX_CALLS:
            return build_invalid(f"at most {MAX_CALLS} consecutive tool calls are allowed", f"input[{at}]")
    return messages + _merge_turn(turn)


def _is_same_turn(turn: Sequence[Message], message: Message, calls: int) -> bool:
    """Return whether a message belongs to the turn before it.

    A tool call always continues the turn. Reasoning and text continue the turn only if it has no tool call yet and its
    last message has no text.
    """
    if not turn or turn[0].role != "assistant" or message.role != "assistant":
        return False
    return bool(message.tool_calls) or (not calls and not turn[-1].content)


def _merge_turn(turn: Sequence[Message]) -> list[Message]:
    """Join the messages of one turn in linear time; empty without messages."""
    if len(turn) <= 1:
        return list(turn)
    return [
        replace(
            turn[0],
            content="".join(message.content for message in turn),
            tool_calls=tuple(chain.from_iterable(message.tool_calls for message in turn)),
            reasoning="\n".join(message.reasoning for message in turn if message.reasoning),
        )
    ]


def _convert_item(item: Item, offered: Mapping[tuple[str, str], str]) -> Message:
    """Convert an item. `offered` maps the namespace and the name of a tool to the name of its function."""
    if isinstance(item, MessageItem):
        return Message(item.role, _join_text(item.content))
    if isinstance(item, CallItem | CustomCallItem):
        arguments = item.arguments or "" if isinstance(item, CallItem) else encode_input(item.input)
        name = offered.get((str(item.namespace or ""), item.name), item.name)
        return Message("assistant", tool_calls=(ToolCall(item.call_id, name, arguments),))
    if isinstance(item, OutputItem | CustomOutputItem):
        return Message("tool", _join_text(item.output), tool_call_id=item.call_id)
    thoughts = item.content or item.summary or ()
    return Message("assistant", reasoning="\n".join(block.text for block in thoughts))


def list_omitted_parts(items: str | Iterable[InputItem]) -> list[str]:
    """Return the parts of results that are no text, as `path=type`."""
    return [
        f"input[].output[].type={part.type}"
        for item in items
        if isinstance(item, OutputItem | CustomOutputItem)
        for part in item.output or ()
        if isinstance(part, ForeignPart)
    ]


def _join_text(content: Content | ToolOutput | None) -> str:
    return content if isinstance(content, str) else "".join(map(_render_part, content or ()))


def _render_part(part: ContentPart | ForeignPart) -> str:
    if isinstance(part, ForeignPart):
        return render_omitted_part(part)
    return part.refusal if isinstance(part, OutputRefusal) else part.text
