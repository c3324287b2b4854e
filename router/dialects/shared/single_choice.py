"""Validated and bounded answer with one choice, for dialects without several choices."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple, cast

import msgspec

from router.dialects.shared.tool_calls import MAX_CALLS_SENT, AnswerToolCall, call_of
from router.dispatch.request import CompleteAnswer
from wire.frames import Channel, Delta


class SingleChoiceAnswer(NamedTuple):
    """Whole answer: reasoning, content and tool calls."""

    reasoning: str
    content: str
    calls: list[AnswerToolCall]


class StreamSplitter:
    """Splitter of a stream into texts and calls; `calls` counts the calls passed on."""

    def __init__(self) -> None:
        self.calls = 0

    def of(self, deltas: Iterable[Delta]) -> Iterator[tuple[Channel, str, AnswerToolCall | None]]:
        """Yield the parts for a client: a text with its channel, or a call."""
        for delta in deltas:
            if delta.choice:
                continue
            for channel, text in delta.pieces:
                if channel == Channel.TOOL_CALL:
                    call = call_of(text) if self.calls < MAX_CALLS_SENT else None
                    if call is not None:
                        self.calls += 1
                        yield Channel.TOOL_CALL, "", call
                elif text and channel in (Channel.CONTENT, Channel.REASONING):
                    yield Channel(channel), text, None


def assemble_answer(answer: CompleteAnswer) -> SingleChoiceAnswer:
    """Assemble a whole answer."""
    calls = [call for call in map(call_of, answer.calls.get(0, ())) if call is not None]
    texts = answer.texts
    return SingleChoiceAnswer(
        texts.get((0, Channel.REASONING), ""), texts.get((0, Channel.CONTENT), ""), calls[:MAX_CALLS_SENT]
    )


def arguments_of(call: AnswerToolCall) -> dict[str, object]:
    """Return a call's arguments as an object; empty if they are not an object, which an engine never sends."""
    try:
        found: object = msgspec.json.decode(call.arguments)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return {}
    return cast("dict[str, object]", found) if isinstance(found, dict) else {}
