"""`/v1/messages`: deltas and usage into Anthropic's answer, whole or as events; and its shape of an error.

A stream is a list of blocks, each opened, filled and closed before the next: a thought, a text, a call. The exact count
of the prompt is in the first event once a node has told it, and in the last in any case.
"""

from collections.abc import Iterable

import msgspec

from router.dialects.shared.interface import comment
from router.dialects.shared.single_choice import Pieces, arguments_of, spoken
from router.dialects.shared.tool_calls import Call
from router.dispatch.request import Answer, Job
from router.errors import Problem
from wire.frames import Channel, Delta, Finished

SIGNATURE = "unsigned"
"""Anthropic signs what its models think, and clients hand it back unread. Nothing is to be proven here, but a text must
be there: some clients drop a thought without one."""
_TYPES: dict[int, str] = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip

Block = dict[str, object]


def error_of(problem: Problem, request_id: str) -> bytes:
    """Give an error in Anthropic's shape; what else is known of it stands beside its message."""
    kind = _TYPES.get(problem.status, "invalid_request_error" if problem.status < 500 else "api_error")
    error: dict[str, object] = {"type": kind, "message": problem.message, "code": problem.code, "param": problem.param}
    if problem.memory is not None:
        error["memory"] = msgspec.structs.asdict(problem.memory)
    return msgspec.json.encode({"type": "error", "error": error, "request_id": request_id})


def event(kind: str, **parts: object) -> bytes:
    """Give one event."""
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **parts}))


class MessageChunks:
    """Makes the events of one stream. `prompt_tokens`: as known when it opens; without `thoughts` none are told."""

    def __init__(self, job: Job, prompt_tokens: int, thoughts: bool) -> None:
        self._job = job
        self._prompt_tokens = prompt_tokens
        self._thoughts = thoughts
        self._pieces = Pieces()
        self._index = -1
        self._open: Channel | None = None

    def keepalive(self, why: str) -> bytes:
        """Return a ping, behind a comment where there is something to say."""
        return (comment(why) if why else b"") + event("ping")

    def opening(self) -> bytes:
        """Give the message without its content."""
        usage = _usage(self._prompt_tokens, 0, 0)
        return event("message_start", message=_message(self._job, [], None, None, usage))

    def deltas(self, deltas: Iterable[Delta]) -> bytes:
        """Give the events of some deltas."""
        events = b""
        for channel, text, call in self._pieces.of(deltas):
            if call is not None:
                events += self._called(call)
            elif channel is Channel.CONTENT:
                events += self._in(channel, {"type": "text", "text": ""})
                events += self._delta({"type": "text_delta", "text": text})
            elif self._thoughts:
                events += self._in(channel, {"type": "thinking", "thinking": "", "signature": ""})
                events += self._delta({"type": "thinking_delta", "thinking": text})
        return events

    def closing(self, finished: Finished) -> bytes:
        """Give why the message ends, what it took, and its end."""
        reason, stop = stop_of(finished, self._pieces.calls)
        usage = _usage(finished.prompt_tokens, finished.cached_tokens, finished.completion_tokens, finished.thought)
        ended = event("message_delta", delta={"stop_reason": reason, "stop_sequence": stop}, usage=usage)
        return self._close() + ended + event("message_stop")

    def failing(self, problem: Problem) -> bytes:
        """Give the event that ends a stream that broke."""
        return b"event: error\ndata: %s\n\n" % error_of(problem, self._job.request_id)

    def _called(self, call: Call) -> bytes:
        """Give a block that is filled by one delta: a call is told when it is finished."""
        whole = self._begin(Channel.TOOL_CALL, _use(call, {}))
        return whole + self._delta({"type": "input_json_delta", "partial_json": call.arguments}) + self._close()

    def _in(self, channel: Channel, block: Block) -> bytes:
        return b"" if self._open is channel else self._begin(channel, block)

    def _begin(self, channel: Channel, block: Block) -> bytes:
        before = self._close()
        self._index += 1
        self._open = channel
        return before + event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: Block) -> bytes:
        return event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> bytes:
        channel, self._open = self._open, None
        if channel is None:
            return b""
        signed = channel is Channel.REASONING
        before = self._delta({"type": "signature_delta", "signature": SIGNATURE}) if signed else b""
        return before + event("content_block_stop", index=self._index)


def message(job: Job, answer: Answer, finished: Finished, thoughts: bool) -> bytes:
    """Give the whole answer of a request that did not ask for a stream."""
    said = spoken(answer)
    content: list[Block] = []
    if said.reasoning and thoughts:
        content.append({"type": "thinking", "thinking": said.reasoning, "signature": SIGNATURE})
    if said.content:
        content.append({"type": "text", "text": said.content})
    content += [_use(call, arguments_of(call)) for call in said.calls]
    reason, stop = stop_of(finished, len(said.calls))
    usage = _usage(finished.prompt_tokens, finished.cached_tokens, finished.completion_tokens, finished.thought)
    return msgspec.json.encode(_message(job, content, reason, stop, usage))


def _use(call: Call, given: Block) -> Block:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": given}


def stop_of(finished: Finished, calls: int) -> tuple[str, str | None]:
    """Say why it ended, and which stop sequence it was if one did."""
    reason = finished.reasons[0] if finished.reasons else "stop"
    stop = finished.stops[0] if finished.stops else ""
    if stop:
        return "stop_sequence", stop
    if reason == "length":
        return "max_tokens", None
    return "tool_use" if calls else "end_turn", None


def _message(job: Job, content: list[Block], reason: str | None, stop: str | None, usage: Block) -> Block:
    return {
        "id": f"msg_{job.request_id}",
        "type": "message",
        "role": "assistant",
        "model": job.demand.model,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": stop,
        "usage": usage,
    }


def _usage(prompt: int, cached: int, output: int, thought: int = 0) -> Block:
    """Give the counts: there the input is what was not found in a cache."""
    return {
        "input_tokens": max(0, prompt - cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
        "output_tokens_details": {"thinking_tokens": thought},
    }
