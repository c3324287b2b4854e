"""`/api/chat` and `/api/generate`: convert deltas and usage to Ollama's answer, as one object or as lines of JSON."""

import math
from collections.abc import Iterable
from datetime import UTC, datetime

import msgspec

from router.dialects.shared.interface import DialectStyle
from router.dialects.shared.single_choice import StreamSplitter, assemble_answer, decode_arguments
from router.dialects.shared.tool_calls import AnswerToolCall
from router.dispatch.request import CompleteAnswer, RequestSpec
from router.errors import Problem
from wire.frames import Channel, Delta, Finished

Line = dict[str, object]


def encode_error(problem: Problem, request_id: str) -> bytes:
    """Encode an error as JSON in Ollama's format, with the message in `error`.

    Macpool adds the fields `code`, `param`, `request_id` and, if known, `memory`.
    """
    error: Line = {"error": problem.message, "code": problem.code, "param": problem.param, "request_id": request_id}
    if problem.memory is not None:
        error["memory"] = msgspec.structs.asdict(problem.memory)
    return msgspec.json.encode(error)


OLLAMA = DialectStyle(encode_error, b"application/x-ndjson")


def format_time(seconds: int) -> str:
    """Return a time in Unix seconds as text in Ollama's format (RFC 3339, UTC)."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class AnswerShape:
    """Format of the answer to the request `spec`. `chat` selects the format of `/api/chat`, else `/api/generate`.

    The text is in `message` for `/api/chat`, and in `response` for `/api/generate`.
    """

    def __init__(self, spec: RequestSpec, chat: bool) -> None:
        self.spec = spec
        self._chat = chat
        self._about: Line = {"model": spec.demand.model, "created_at": format_time(spec.created)}

    def build_line(
        self,
        content: str,
        thinking: str = "",
        calls: Iterable[AnswerToolCall] = (),
        end: Line | None = None,
        first_call: int = 0,
    ) -> Line:
        """Return a complete answer, or one line of a stream, as a JSON object.

        `end` are the additional fields of a complete answer and of the last line (`build_end_fields`); None for any
        other line. `first_call` is the number of calls in earlier lines of the stream.
        """
        message: Line = {"role": "assistant", "content": content} if self._chat else {"response": content}
        if thinking:
            message["thinking"] = thinking
        tool_calls = [_convert_call(call, index) for index, call in enumerate(calls, first_call)]
        if tool_calls:
            message["tool_calls"] = tool_calls
        return {**self._about, **({"message": message} if self._chat else message), "done": False, **(end or {})}

    def build_end_fields(self, finished: Finished) -> Line:
        """Return the additional fields of a complete answer or of the last line of a stream.

        These are the stop reason, token counts, and durations in nanoseconds. `load_duration` is the time for which the
        request was queued on the node. `cached_tokens`, a field that Ollama does not have, is the number of prompt
        tokens from the prefix cache.
        """
        timings = finished.timings
        waiting, prefill, decode = map(_to_nanoseconds, (timings.waiting, timings.prefill, timings.decode))
        cut = bool(finished.reasons) and finished.reasons[0] == "length"
        return {
            "done": True,
            "done_reason": "length" if cut else "stop",
            "total_duration": waiting + prefill + decode,
            "load_duration": waiting,
            "prompt_eval_count": finished.prompt_tokens,
            "cached_tokens": finished.cached_tokens,
            "prompt_eval_duration": prefill,
            "eval_count": finished.completion_tokens,
            "eval_duration": decode,
        }


class OllamaChunks:
    """Encoder of one streamed answer into lines of JSON."""

    def __init__(self, shape: AnswerShape) -> None:
        self._shape = shape
        self._pieces = StreamSplitter()

    def encode_keepalive(self, why: str) -> bytes:
        """Encode a line without text, because the format has no comments. `why` is ignored."""
        return _encode_line(self._shape.build_line(""))

    def encode_opening(self) -> bytes:
        """Return empty bytes, because a stream begins with its first text."""
        return b""

    def encode_deltas(self, deltas: Iterable[Delta]) -> bytes:
        """Encode the deltas of the first choice, one line for each text or call; empty if there are none.

        Invalid calls, and calls above `MAX_CALLS_SENT`, are omitted.
        """
        lines = b""
        for channel, text, call in self._pieces.split(deltas):
            if call is not None:
                line = self._shape.build_line("", calls=(call,), first_call=self._pieces.calls - 1)
            else:
                line = (
                    self._shape.build_line("", text) if channel is Channel.REASONING else self._shape.build_line(text)
                )
            lines += _encode_line(line)
        return lines

    def encode_end(self, finished: Finished) -> bytes:
        """Encode the last line of a complete stream: no text, and the fields of `build_end_fields`."""
        return _encode_line(self._shape.build_line("", end=self._shape.build_end_fields(finished)))

    def encode_failure(self, problem: Problem) -> bytes:
        """Encode the line with the error that ends a failed stream."""
        return encode_error(problem, self._shape.spec.request_id) + b"\n"


def encode_answer(shape: AnswerShape, answer: CompleteAnswer, finished: Finished) -> bytes:
    """Encode the first choice of a complete answer, for a request that does not stream.

    Invalid calls, and calls above `MAX_CALLS_SENT`, are omitted.
    """
    assembled = assemble_answer(answer)
    return msgspec.json.encode(
        shape.build_line(assembled.content, assembled.reasoning, assembled.calls, shape.build_end_fields(finished))
    )


def encode_load(shape: AnswerShape) -> bytes:
    """Encode the answer to a request that has loaded its model."""
    return msgspec.json.encode(shape.build_line("", end={"done": True, "done_reason": "load"}))


def _convert_call(call: AnswerToolCall, index: int) -> Line:
    """Return a call in Ollama's format. Clients that convert it to OpenAI's format join calls with the same `index`."""
    return {"id": call.id, "function": {"index": index, "name": call.name, "arguments": decode_arguments(call)}}


def _encode_line(line: Line) -> bytes:
    return msgspec.json.encode(line) + b"\n"


def _to_nanoseconds(seconds: float) -> int:
    return int(max(0.0, seconds) * 1e9) if math.isfinite(seconds) else 0
