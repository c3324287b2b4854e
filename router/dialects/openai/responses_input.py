"""Conversion of the items of `/v1/responses` to the messages of a `Generate` frame.

Reasoning, text and calls of the model that follow each other in this order become one message.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import cast

from msgspec.structs import replace

from router.admission.request_limits import MAX_CALLS, MAX_TOOLS_BYTES
from router.dialects.openai.responses_schema import (
    COMPACTIONS,
    CallItem,
    Content,
    ContentPart,
    CustomCallItem,
    CustomOutputItem,
    ForeignItem,
    InputItem,
    Item,
    MessageItem,
    OutputItem,
    OutputRefusal,
    OwnItem,
    ToolOutput,
    ToolsItem,
)
from router.dialects.shared.common_fields import ForeignPart
from router.dialects.shared.strict_json import Body, encode_json
from router.dialects.shared.tools import ClientTool, encode_input, render_omitted_part
from router.dialects.shared.validation import build_unsupported
from router.errors import Problem, build_invalid
from wire.frames import Message, ToolCall


def convert_items(items: str | Iterable[Item], origins: Mapping[str, ClientTool]) -> list[Message] | Problem:
    """Return the messages of the items of a body, or a 400 problem. A text becomes one message of the user.

    `origins` maps the names of functions to the tools of the client (`ToolSet.origins`). A call of such a tool gets the
    name under which the tool is offered to the model. A `ToolsItem` gives no message.

    A problem is returned for more than `MAX_CALLS` consecutive tool calls, and for a foreign item that cannot be
    converted (`_convert_foreign_item`).
    """
    if isinstance(items, str):
        return [Message("user", items)]
    messages: list[Message] = []
    turn: list[Message] = []
    calls = 0
    offered = {(tool.namespace, tool.name): name for name, tool in origins.items()}
    for at, item in enumerate(items):
        if isinstance(item, ToolsItem):
            continue
        message = (
            _convert_foreign_item(item, f"input[{at}]")
            if isinstance(item, ForeignItem)
            else _convert_item(item, offered)
        )
        if isinstance(message, Problem):
            return message
        if message is None:
            continue
        if not _is_same_turn(turn, message, calls):
            messages += _merge_turn(turn)
            turn, calls = [], 0
        turn.append(message)
        calls += len(message.tool_calls)
        if calls > MAX_CALLS:
            return build_invalid(f"at most {MAX_CALLS} consecutive tool calls are allowed", f"input[{at}]")
    return messages + _merge_turn(turn)


def _is_same_turn(turn: Sequence[Message], message: Message, calls: int) -> bool:
    """Return whether a message belongs to the turn before it, which has `calls` tool calls.

    A tool call always continues a turn of the assistant. Reasoning and text continue the turn only if it has no tool
    call yet and its last message has no text.
    """
    if not turn or turn[0].role != "assistant" or message.role != "assistant":
        return False
    return bool(message.tool_calls) or (not calls and not turn[-1].content)


def _merge_turn(turn: Sequence[Message]) -> list[Message]:
    """Return one message for the messages of a turn, in linear time; empty if it has none."""
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


def _convert_item(item: OwnItem, offered: Mapping[tuple[str, str], str]) -> Message:
    """Return the message of an item. `offered` maps the namespace and name of a tool to the name of its function."""
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


def _convert_foreign_item(item: ForeignItem, path: str) -> Message | Problem | None:
    """Return the message of a call that another server or its client ran, or of the result of such a call.

    Return None for an item without `call_id`, such as a search on a server, whose result is in the answer after it.
    Return a 400 problem for an item of `COMPACTIONS`, and for arguments or a result that cannot be encoded.
    """
    if item.type in COMPACTIONS:
        why = f"{path}.type {item.type!r} is not supported: only its server can read it: begin a new conversation"
        return build_unsupported(f"{path}.type", why=why)
    if item.call_id is None:
        return None
    fields = dict(item.model_extra or {})
    if item.type.endswith("_output"):
        output = _render_foreign_output(fields.get("output"))
        return output if isinstance(output, Problem) else Message("tool", output, tool_call_id=item.call_id)
    arguments = {name: value for name, value in fields.items() if name not in ("id", "status")}
    text = encode_json(arguments, path, MAX_TOOLS_BYTES)
    if isinstance(text, Problem):
        return text
    return Message("assistant", tool_calls=(ToolCall(item.call_id, item.type.removesuffix("_call"), text),))


def _render_foreign_output(output: object) -> str | Problem:
    """Return the text of a result, in which a part that is not text, such as a screenshot, is replaced by a note.

    Return a 400 problem for a part that cannot be encoded.
    """
    parts = cast("list[object]", output) if isinstance(output, list) else [output]
    texts = [_render_foreign_part(part) for part in parts]
    problem = next((text for text in texts if isinstance(text, Problem)), None)
    return problem or "\n".join(text for text in texts if isinstance(text, str))


def _render_foreign_part(part: object) -> str | Problem:
    if part is None or isinstance(part, str):
        return part or ""
    fields = cast("Body", part) if isinstance(part, dict) else {}
    text, kind = fields.get("text"), fields.get("type")
    if isinstance(text, str):
        return text
    if isinstance(kind, str) and kind:
        return render_omitted_part(kind)
    return encode_json(cast("object", part), "input", MAX_TOOLS_BYTES)


def list_omitted_items(items: str | Iterable[InputItem]) -> list[str]:
    """Return the items that the prompt omits, as `path=type`. These are items of other servers without a call id."""
    return [f"input[].type={item.type}" for item in items if isinstance(item, ForeignItem) and item.call_id is None]


def list_omitted_parts(items: str | Iterable[InputItem]) -> list[str]:
    """Return the parts of tool results that are not text, such as images, as `path=type`."""
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
        return render_omitted_part(part.type)
    return part.refusal if isinstance(part, OutputRefusal) else part.text
