"""`/v1/chat/completions`: convert deltas and usage to OpenAI's answer, as one object or as server-sent events.

The hot path is `ChatChunks.encode_deltas`. The event for a piece of text is a prefix, the text escaped by the C
encoder, and a suffix. Prefix and suffix are prepared once per choice and channel. Log probabilities and tool calls take
a slower path.
"""

import hashlib
import json
from collections.abc import Collection, Iterable
from functools import lru_cache
from json.encoder import encode_basestring_ascii

import msgspec
from msgspec import UNSET, UnsetType

from router.dialects.shared.interface import encode_comment
from router.dialects.shared.tool_calls import MAX_CALLS_SENT, Logprobs, convert_logprobs, get_finish_reason, parse_call
from router.dialects.shared.tools import decode_input
from router.dispatch.request import CompleteAnswer, RequestSpec
from router.errors import Problem
from wire.frames import Channel, Delta, Finished

DONE = b"data: [DONE]\n\n"

_FIELDS = {Channel.CONTENT: "content", Channel.REASONING: "reasoning_content"}
_CONTENT, _REASONING = Channel.CONTENT, Channel.REASONING
"""Members of `Channel` as constants, because Python 3.11 takes 0.1 µs to look up a member of an enumeration."""
_SHIFT = 8
_encode = msgspec.json.Encoder().encode


class ChatChunks:
    """Encoder of one streamed answer into OpenAI's chunks.

    `custom` has the names of the custom tools. `fingerprint` is that of the model's files; empty if unknown.
    """

    def __init__(self, spec: RequestSpec, custom: Collection[str] = (), fingerprint: str = "") -> None:
        self._custom = custom
        self._request_id = spec.request_id
        self._choices = choices = spec.params.n
        self._include_usage = spec.include_usage
        self._logprobs = spec.params.logprobs
        self._top = spec.params.top_logprobs
        self._calls = [0] * choices
        self._head = (
            f'data: {{"id":"chatcmpl-{spec.request_id}","object":"chat.completion.chunk","created":{spec.created},'
            f'"model":{json.dumps(spec.demand.model)},"system_fingerprint":{json.dumps(compute_system_fingerprint(fingerprint))},'
        )
        self._tail = ',"usage":null}\n\n' if spec.include_usage else "}\n\n"
        self._prefixes = {
            choice << _SHIFT | channel: f'{self._head}"choices":[{{"index":{choice},"delta":{{"{field}":'
            for choice in range(choices)
            for channel, field in _FIELDS.items()
        }
        self._suffix = '},"logprobs":null,"finish_reason":null}]' + self._tail

    def encode_keepalive(self, why: str) -> bytes:
        """Encode a server-sent comment with the reason of a wait (`why`), which may be empty."""
        return encode_comment(why)

    def encode_opening(self) -> bytes:
        """Encode a chunk with the role of the assistant for every choice."""
        delta = '{"role":"assistant","content":""}'
        return "".join(self._encode_choice(choice, delta) for choice in range(self._choices)).encode()

    def encode_deltas(self, deltas: Iterable[Delta]) -> bytes:
        """Encode deltas as chunks; empty if they have nothing for the client."""
        prefixes = self._prefixes
        suffix = self._suffix
        events = ""
        for delta in deltas:
            if delta.logprobs:
                events += self._encode_with_logprobs(delta)
                continue
            for channel, text in delta.pieces:
                prefix = prefixes.get(delta.choice << _SHIFT | channel)
                if prefix is None:
                    events += self._encode_call(delta.choice, channel, text)
                elif text:
                    events += f"{prefix}{encode_basestring_ascii(text)}{suffix}"
        return events.encode()

    def encode_end(self, finished: Finished) -> bytes:
        """Encode the finish reasons of all choices, the usage if requested, and the end of the stream."""
        ends = "".join(
            self._encode_choice(choice, "{}", reason=f'"{_get_finish_reason(finished, choice, calls)}"')
            for choice, calls in enumerate(self._calls)
        )
        usage = (
            f'{self._head}"choices":[],"usage":{_render_json(build_usage(finished))}}}\n\n'
            if self._include_usage
            else ""
        )
        return (ends + usage).encode() + DONE

    def encode_failure(self, problem: Problem) -> bytes:
        """Encode the error event that ends a failed stream, without `[DONE]`."""
        return problem.encode_event(self._request_id)

    def _encode_choice(self, choice: int, delta: str, logprobs: str = "null", reason: str = "null") -> str:
        body = f'"choices":[{{"index":{choice},"delta":{delta},"logprobs":{logprobs},"finish_reason":{reason}}}]'
        return self._head + body + self._tail

    def _encode_with_logprobs(self, delta: Delta) -> str:
        """Return the chunks of a delta with log probabilities.

        The log probabilities are sent with the content of the delta, else with its reasoning. If the delta has neither,
        because its text is not final yet or is a tool call, they are sent with an empty content.
        """
        choice = delta.choice
        if not 0 <= choice < self._choices:
            return ""
        logprobs = _render_json(convert_logprobs(delta.logprobs, self._top)) if self._logprobs else "null"
        texts = [(_FIELDS[Channel(channel)], text) for channel, text in delta.pieces if text and channel in _FIELDS]
        events = ""
        if logprobs != "null" and not texts:
            texts = [("content", "")]
        carrier = next((at for at, (field, _) in enumerate(texts) if field == "content"), 0)
        for at, (field, text) in enumerate(texts):
            piece = f'{{"{field}":{encode_basestring_ascii(text)}}}'
            events += self._encode_choice(choice, piece, logprobs if at == carrier else "null")
        return events + "".join(self._encode_call(choice, channel, text) for channel, text in delta.pieces)

    def _encode_call(self, choice: int, channel: int, piece: str) -> str:
        """Return the chunk of one tool call.

        Return an empty string if `piece` is not a valid call of a requested choice, or if the choice already has
        `MAX_CALLS_SENT` calls.
        """
        if channel != Channel.TOOL_CALL or not 0 <= choice < self._choices or self._calls[choice] >= MAX_CALLS_SENT:
            return ""
        call = convert_call(piece, self._custom)
        if call is None:
            return ""
        index = self._calls[choice]
        self._calls[choice] += 1
        return self._encode_choice(choice, _render_json({"tool_calls": [{"index": index} | call]}))


def convert_call(piece: str, custom: Collection[str] = ()) -> dict[str, object] | None:
    """Return a tool call of the engine in OpenAI's format; None if it is invalid. `piece` is the call as JSON.

    `custom` has the names of the custom tools. All other calls are calls of functions.
    """
    call = parse_call(piece)
    if call is None:
        return None
    if call.name in custom:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": decode_input(call)}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class _UsageDetails(msgspec.Struct, gc=False):
    cached_tokens: int


class _Written(msgspec.Struct, gc=False):
    reasoning_tokens: int


class UsageField(msgspec.Struct, gc=False):
    """Field `usage` of an answer, with the token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: _UsageDetails
    completion_tokens_details: _Written


class _AnswerMessage(msgspec.Struct, gc=False):
    role: str
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[dict[str, object]] | UnsetType = UNSET


class _Choice(msgspec.Struct, gc=False):
    index: int
    message: _AnswerMessage
    logprobs: Logprobs | None
    finish_reason: str


class _Completion(msgspec.Struct, gc=False):
    id: str
    object: str
    created: int
    model: str
    choices: list[_Choice]
    usage: UsageField
    system_fingerprint: str | None


def encode_completion(
    spec: RequestSpec, answer: CompleteAnswer, finished: Finished, custom: Collection[str] = ()
) -> bytes:
    """Encode the complete answer to a request that does not stream.

    `custom` has the names of the custom tools of the request.
    """
    choices = [_build_choice(choice, spec, answer, finished, custom) for choice in range(spec.params.n)]
    name = f"chatcmpl-{spec.request_id}"
    return _encode(
        _Completion(
            name,
            "chat.completion",
            spec.created,
            spec.demand.model,
            choices,
            build_usage(finished),
            compute_system_fingerprint(answer.fingerprint),
        )
    )


@lru_cache(maxsize=64)
def compute_system_fingerprint(fingerprint: str) -> str | None:
    """Return OpenAI's `system_fingerprint` for the fingerprint of a model's files; None if that is empty."""
    return f"fp_{hashlib.sha256(fingerprint.encode()).hexdigest()[:12]}" if fingerprint else None


def _build_choice(
    choice: int, spec: RequestSpec, answer: CompleteAnswer, finished: Finished, custom: Collection[str]
) -> _Choice:
    calls = _convert_calls(answer.calls[choice], custom) if choice in answer.calls else []
    content = answer.texts.get((choice, _CONTENT), "")
    reasoning = answer.texts.get((choice, _REASONING)) or UNSET
    message = _AnswerMessage("assistant", (content or None) if calls else content, None, reasoning, calls or UNSET)
    logprobs = _build_logprobs(choice, answer, spec) if spec.params.logprobs else None
    return _Choice(choice, message, logprobs, _get_finish_reason(finished, choice, len(calls)))


def _convert_calls(pieces: Iterable[str], custom: Collection[str]) -> list[dict[str, object]]:
    return [call for call in (convert_call(piece, custom) for piece in pieces) if call is not None][:MAX_CALLS_SENT]


def _build_logprobs(choice: int, answer: CompleteAnswer, spec: RequestSpec) -> Logprobs:
    return convert_logprobs(answer.logprobs.get(choice, ()), spec.params.top_logprobs)


def _get_finish_reason(finished: Finished, choice: int, calls: int) -> str:
    reason = finished.reasons[choice] if choice < len(finished.reasons) else "stop"
    return get_finish_reason(reason, calls)


def _render_json(value: object) -> str:
    return _encode(value).decode()


def build_usage(finished: Finished) -> UsageField:
    """Return the token counts of a finished request in OpenAI's format."""
    prompt, written = finished.prompt_tokens, finished.completion_tokens
    return UsageField(
        prompt, written, prompt + written, _UsageDetails(finished.cached_tokens), _Written(finished.reasoning_tokens)
    )
