"""Items of `/v1/responses` into messages: what a model thought, said and called in a row is one message."""

from collections.abc import Iterable

from msgspec.structs import replace

from router.dialects.limits import MOST_CALLS
from router.dialects.responses_body import CallItem, Content, Item, MessageItem, OutputItem, Refusal
from router.problems import Problem, invalid
from wire.frames import Message, ToolCall


def messages_of(found: str | Iterable[Item]) -> list[Message] | Problem:
    """Give the messages, or say which item is one too many."""
    if isinstance(found, str):
        return [Message("user", found)]
    messages: list[Message] = []
    for at, item in enumerate(found):
        add(messages, _message(item))
        if len(messages[-1].tool_calls) > MOST_CALLS:
            return invalid(f"the model made more than {MOST_CALLS} calls at once", f"input[{at}]")
    return messages


def add(messages: list[Message], message: Message) -> None:
    """Put a message behind the others. What the model says goes on with what it thought or said before, until it has
    called: a text after a call begins anew."""
    last = messages[-1] if messages else None
    begun = last is not None and last.role == message.role == "assistant" and not last.content
    called = last is not None and last.role == message.role == "assistant" and bool(message.tool_calls)
    if last is None or not (called or (begun and not last.tool_calls)):
        messages.append(message)
        return
    messages[-1] = replace(
        last,
        content=last.content + message.content,
        tool_calls=last.tool_calls + message.tool_calls,
        reasoning="\n".join(thought for thought in (last.reasoning, message.reasoning) if thought),
    )


def _message(item: Item) -> Message:
    if isinstance(item, MessageItem):
        return Message(item.role, _text(item.content))
    if isinstance(item, CallItem):
        return Message("assistant", tool_calls=(ToolCall(item.call_id, item.name, item.arguments),))
    if isinstance(item, OutputItem):
        return Message("tool", _text(item.output), tool_call_id=item.call_id)
    thoughts = item.content or item.summary or ()
    return Message("assistant", reasoning="\n".join(thought.text for thought in thoughts))


def _text(content: Content) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.refusal if isinstance(part, Refusal) else part.text for part in content)
