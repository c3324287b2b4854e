"""`/v1/chat/completions`: deltas and usage into OpenAI's answer, whole or as server-sent events.

The hot path is `ChatChunks.deltas`: one event per piece of text is a prefix and a suffix that were made once per choice
and channel, with the text escaped by the C encoder between them.
"""

import json
from collections.abc import Iterable, Mapping
from json.encoder import encode_basestring_ascii

import msgspec

from wire.frames import Channel, Delta, Finished

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": waiting\n\n"

_FIELDS = {Channel.CONTENT: "content", Channel.REASONING: "reasoning_content"}
_SHIFT = 8


class ChatChunks:
    """Makes the events of one stream."""

    def __init__(self, request_id: str, model: str, created: int, choices: int, *, include_usage: bool) -> None:
        self._choices = choices
        self._include_usage = include_usage
        self._head = (
            f'data: {{"id":"chatcmpl-{request_id}","object":"chat.completion.chunk","created":{created},'
            f'"model":{json.dumps(model)},'
        )
        self._tail = ',"usage":null}\n\n' if include_usage else "}\n\n"
        self._prefixes = {
            choice << _SHIFT | channel: f'{self._head}"choices":[{{"index":{choice},"delta":{{"{field}":'
            for choice in range(choices)
            for channel, field in _FIELDS.items()
        }
        self._suffix = '},"logprobs":null,"finish_reason":null}]' + self._tail

    def opening(self) -> bytes:
        """Give the chunk that names the role, for every choice."""
        delta = '{"role":"assistant","content":""}'
        return "".join(self._choice(choice, delta, "null") for choice in range(self._choices)).encode()

    def deltas(self, deltas: Iterable[Delta]) -> bytes:
        """Give the events of some deltas; empty when none of them has text."""
        prefixes = self._prefixes
        suffix = self._suffix
        events = ""
        for delta in deltas:
            for channel, text in delta.pieces:
                prefix = prefixes.get(delta.choice << _SHIFT | channel)
                if prefix is not None and text:
                    events += prefix + encode_basestring_ascii(text) + suffix
        return events.encode()

    def closing(self, finished: Finished) -> bytes:
        """Give the reasons of all choices, the usage if it was asked for, and the end of the stream."""
        reasons = (finished.reasons + ("stop",) * self._choices)[: self._choices]
        ends = "".join(self._choice(choice, "{}", json.dumps(reason)) for choice, reason in enumerate(reasons))
        usage = (
            f'{self._head}"choices":[],"usage":{json.dumps(usage_of(finished))}}}\n\n' if self._include_usage else ""
        )
        return (ends + usage).encode() + DONE

    def _choice(self, choice: int, delta: str, reason: str) -> str:
        body = f'"choices":[{{"index":{choice},"delta":{delta},"logprobs":null,"finish_reason":{reason}}}]'
        return self._head + body + self._tail


def completion(
    request_id: str,
    model: str,
    created: int,
    choices: int,
    texts: Mapping[tuple[int, int], str],
    finished: Finished,
) -> bytes:
    """Give the whole answer of a request that did not ask for a stream; `texts` by choice and channel."""
    reasons = (finished.reasons + ("stop",) * choices)[:choices]
    answer: dict[str, object] = {
        "id": f"chatcmpl-{request_id}",
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [_choice(index, texts, reasons[index]) for index in range(choices)],
        "usage": usage_of(finished),
    }
    return msgspec.json.encode(answer)


def _choice(index: int, texts: Mapping[tuple[int, int], str], reason: str) -> dict[str, object]:
    content = texts.get((index, Channel.CONTENT), "")
    message: dict[str, object] = {"role": "assistant", "content": content, "refusal": None}
    reasoning = texts.get((index, Channel.REASONING), "")
    if reasoning:
        message["reasoning_content"] = reasoning
    return {"index": index, "message": message, "logprobs": None, "finish_reason": reason}


def usage_of(finished: Finished) -> dict[str, object]:
    """Give the exact counts of a finished request."""
    return {
        "prompt_tokens": finished.prompt_tokens,
        "completion_tokens": finished.completion_tokens,
        "total_tokens": finished.prompt_tokens + finished.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": finished.cached_tokens},
    }
