"""Answers with one choice, validated and limited, for the dialects that do not have several choices."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple, cast

import msgspec

from router.dialects.shared.tool_calls import MAX_CALLS_SENT, AnswerToolCall, parse_call
from router.dispatch.request import CompleteAnswer
from wire.frames import Channel, Delta


class SingleChoiceAnswer(NamedTuple):
    """Complete answer with one choice: reasoning, content and tool calls."""

    reasoning: str
    content: str
    calls: list[AnswerToolCall]


class StreamSplitter:
    """Splitter of streamed deltas into texts and tool calls. `calls` is the number of calls yielded so far."""

    def __init__(self) -> None:
        self.calls = 0

    def split(self, deltas: Iterable[Delta]) -> Iterator[tuple[Channel, str, AnswerToolCall | None]]:
        """Yield the parts of the first choice as (channel, text, call).

        The call is None for a text, and the text is empty for a call. Empty texts, invalid calls, and calls above
        `MAX_CALLS_SENT` are omitted.
        """
        for delta in deltas:
            if delta.choice:
                continue
            for channel, text in delta.pieces:
                if channel == Channel.TOOL_CALL:
                    call = parse_call(text) if self.calls < MAX_CALLS_SENT else None
                    if call is not None:
                        self.calls += 1
                        yield Channel.TOOL_CALL, "", call
                elif text and channel in (Channel.CONTENT, Channel.REASONING):
                    yield Channel(channel), text, None


def assemble_answer(answer: CompleteAnswer) -> SingleChoiceAnswer:
    """Return the reasoning, the content and the tool calls of the first choice.

    Invalid calls, and calls above `MAX_CALLS_SENT`, are omitted.
    """
    calls = [call for call in map(parse_call, answer.calls.get(0, ())) if call is not None]
    texts = answer.texts
    return SingleChoiceAnswer(
        texts.get((0, Channel.REASONING), ""), texts.get((0, Channel.CONTENT), ""), calls[:MAX_CALLS_SENT]
    )


def decode_arguments(call: AnswerToolCall) -> dict[str, object]:
    """Return the arguments of a call as a dictionary; empty if they are not a JSON object."""
    try:
        decoded: object = msgspec.json.decode(call.arguments)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return {}
    return cast("dict[str, object]", decoded) if isinstance(decoded, dict) else {}
