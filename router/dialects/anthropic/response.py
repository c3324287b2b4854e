"""`/v1/messages`: convert deltas and usage to Anthropic's answer, as one message or as events, and encode its errors.

A stream is a list of blocks: reasoning, texts and calls. Each block is opened, filled and closed before the next. The
first event has the exact number of prompt tokens if a node has counted them by then. In a complete stream, the event
`message_delta` always has it.
"""

from collections.abc import Iterable

import msgspec

from router.dialects.shared.interface import encode_comment
from router.dialects.shared.single_choice import StreamSplitter, assemble_answer, decode_arguments
from router.dialects.shared.tool_calls import AnswerToolCall
from router.dispatch.request import CompleteAnswer, RequestSpec
from router.errors import Problem
from wire.frames import Channel, Delta, Finished

SIGNATURE = "unsigned"
"""Signature of reasoning blocks.

Anthropic signs the reasoning of its models, and clients return the signature unchanged. Macpool signs nothing, but some
clients drop a reasoning block without a signature.
"""
_TYPES: dict[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

Block = dict[str, object]


def encode_error(problem: Problem, request_id: str) -> bytes:
    """Encode an error as JSON in Anthropic's format. Macpool adds the fields `code`, `param` and, if known, `memory`.

    The code is also in `details`, where Claude Code reads it.
    """
    kind = _TYPES.get(problem.status, "invalid_request_error" if problem.status < 500 else "api_error")
    error: dict[str, object] = {"type": kind, "message": problem.message, "code": problem.code, "param": problem.param}
    error["details"] = {"error_code": problem.code}
    if problem.memory is not None:
        error["memory"] = msgspec.structs.asdict(problem.memory)
    return msgspec.json.encode({"type": "error", "error": error, "request_id": request_id})


def encode_event(kind: str, **parts: object) -> bytes:
    """Encode a server-sent event of the type `kind`. Its data is a JSON object with the type and `parts`."""
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **parts}))


class MessageChunks:
    """Encoder of one streamed answer into Anthropic's events.

    `prompt_tokens` is the number of prompt tokens for the first event; 0 if no node has counted them yet. `thoughts`
    tells whether the events include the reasoning.
    """

    def __init__(self, spec: RequestSpec, prompt_tokens: int, thoughts: bool) -> None:
        self._spec = spec
        self._prompt_tokens = prompt_tokens
        self._thoughts = thoughts
        self._pieces = StreamSplitter()
        self._index = -1
        self._open: Channel | None = None

    def encode_keepalive(self, why: str) -> bytes:
        """Encode a ping, after a comment with the reason of a wait (`why`) unless that is empty."""
        return (encode_comment(why) if why else b"") + encode_event("ping")

    def encode_opening(self) -> bytes:
        """Encode the first event: the message without content."""
        usage = _build_usage(self._prompt_tokens, 0, 0)
        return encode_event("message_start", message=_build_message(self._spec, [], None, None, usage))

    def encode_deltas(self, deltas: Iterable[Delta]) -> bytes:
        """Encode the deltas of the first choice as events of content blocks; empty if they add nothing to a block."""
        events = b""
        for channel, text, call in self._pieces.split(deltas):
            if call is not None:
                events += self._encode_call(call)
            elif channel is Channel.CONTENT:
                events += self._open_block(channel, {"type": "text", "text": ""})
                events += self._encode_delta({"type": "text_delta", "text": text})
            elif self._thoughts:
                events += self._open_block(channel, {"type": "thinking", "thinking": "", "signature": ""})
                events += self._encode_delta({"type": "thinking_delta", "thinking": text})
        return events

    def encode_end(self, finished: Finished) -> bytes:
        """Encode the end of a complete stream: end of the open block, stop reason, usage, and end of the message."""
        reason, stop = get_stop_reason(finished, self._pieces.calls)
        usage = _build_usage(
            finished.prompt_tokens, finished.cached_tokens, finished.completion_tokens, finished.reasoning_tokens
        )
        ended = encode_event("message_delta", delta={"stop_reason": reason, "stop_sequence": stop}, usage=usage)
        return self._close() + ended + encode_event("message_stop")

    def encode_failure(self, problem: Problem) -> bytes:
        """Encode the error event that ends a failed stream."""
        return b"event: error\ndata: %s\n\n" % encode_error(problem, self._spec.request_id)

    def _encode_call(self, call: AnswerToolCall) -> bytes:
        """Return the events of a block with a complete call, which has a single delta."""
        opening = self._begin(Channel.TOOL_CALL, _build_tool_use(call, {}))
        return (
            opening + self._encode_delta({"type": "input_json_delta", "partial_json": call.arguments}) + self._close()
        )

    def _open_block(self, channel: Channel, block: Block) -> bytes:
        return b"" if self._open is channel else self._begin(channel, block)

    def _begin(self, channel: Channel, block: Block) -> bytes:
        before = self._close()
        self._index += 1
        self._open = channel
        return before + encode_event("content_block_start", index=self._index, content_block=block)

    def _encode_delta(self, delta: Block) -> bytes:
        return encode_event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> bytes:
        channel, self._open = self._open, None
        if channel is None:
            return b""
        signed = channel is Channel.REASONING
        before = self._encode_delta({"type": "signature_delta", "signature": SIGNATURE}) if signed else b""
        return before + encode_event("content_block_stop", index=self._index)


def encode_message(spec: RequestSpec, answer: CompleteAnswer, finished: Finished, thoughts: bool) -> bytes:
    """Encode the first choice of a complete answer as a message, for a request that does not stream.

    `thoughts` tells whether the message includes the reasoning. Invalid calls, and calls above `MAX_CALLS_SENT`, are
    omitted.
    """
    assembled = assemble_answer(answer)
    content: list[Block] = []
    if assembled.reasoning and thoughts:
        content.append({"type": "thinking", "thinking": assembled.reasoning, "signature": SIGNATURE})
    if assembled.content:
        content.append({"type": "text", "text": assembled.content})
    content += [_build_tool_use(call, decode_arguments(call)) for call in assembled.calls]
    reason, stop = get_stop_reason(finished, len(assembled.calls))
    usage = _build_usage(
        finished.prompt_tokens, finished.cached_tokens, finished.completion_tokens, finished.reasoning_tokens
    )
    return msgspec.json.encode(_build_message(spec, content, reason, stop, usage))


def _build_tool_use(call: AnswerToolCall, arguments: Block) -> Block:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def get_stop_reason(finished: Finished, calls: int) -> tuple[str, str | None]:
    """Return the stop reason of Anthropic's API, and the stop sequence; None if no stop sequence ended the answer.

    `calls` is the number of tool calls in the answer.
    """
    reason = finished.reasons[0] if finished.reasons else "stop"
    stop = finished.stops[0] if finished.stops else ""
    if stop:
        return "stop_sequence", stop
    if reason == "length":
        return "max_tokens", None
    return "tool_use" if calls else "end_turn", None


def _build_message(
    spec: RequestSpec, content: list[Block], reason: str | None, stop: str | None, usage: Block
) -> Block:
    return {
        "id": f"msg_{spec.request_id}",
        "type": "message",
        "role": "assistant",
        "model": spec.demand.model,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": stop,
        "usage": usage,
    }


def _build_usage(prompt: int, cached: int, output: int, reasoning_tokens: int = 0) -> Block:
    """Return the token counts as JSON. In Anthropic's API, the input tokens do not include cached tokens."""
    return {
        "input_tokens": max(0, prompt - cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
        "output_tokens_details": {"thinking_tokens": reasoning_tokens},
    }
