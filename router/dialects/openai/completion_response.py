"""`/v1/completions`: convert deltas and usage to OpenAI's older format, as one object or as server-sent events."""

import json
from collections.abc import Iterable, Sequence
from json.encoder import encode_basestring_ascii

import msgspec

from router.dialects.openai.chat_response import DONE, build_usage
from router.dialects.shared.interface import encode_comment
from router.dialects.shared.tool_calls import render_token
from router.dispatch.request import CompleteAnswer, RequestSpec
from router.errors import Problem
from router.worker_thread import encoded_list
from wire.frames import Channel, Delta, Finished, Logprob


class CompletionChunks:
    """Encoder of one streamed answer into chunks of `/v1/completions`.

    `echoes` has the text that precedes each choice, which may be empty.
    """

    def __init__(self, spec: RequestSpec, echoes: Sequence[str]) -> None:
        self._spec = spec
        self._echoes = echoes
        self._head = f'data: {{{_render_head(spec)},"choices":['
        self._tail = '],"usage":null}\n\n' if spec.include_usage else "]}\n\n"
        self._offsets = [0] * len(echoes)

    def encode_keepalive(self, why: str) -> bytes:
        """Encode a server-sent comment with the reason of a wait (`why`), which may be empty."""
        return encode_comment(why)

    def encode_opening(self) -> bytes:
        """Encode the texts that precede the choices; empty if there are none."""
        events = (self._encode_event(choice, echo) for choice, echo in enumerate(self._echoes) if echo)
        return "".join(events).encode()

    def encode_deltas(self, deltas: Iterable[Delta]) -> bytes:
        """Encode deltas as chunks; empty if they have nothing for the client."""
        return "".join(self._encode_delta(delta) for delta in deltas).encode()

    def _encode_delta(self, delta: Delta) -> str:
        choice = delta.choice
        if not 0 <= choice < len(self._echoes):
            return ""
        text = "".join(text for channel, text in delta.pieces if channel == Channel.CONTENT)
        logprobs = "null"
        if self._spec.params.logprobs and delta.logprobs:
            legacy = convert_logprobs(delta.logprobs, self._spec.params.top_logprobs, self._offsets[choice])
            self._offsets[choice] += sum(map(len, legacy.tokens))
            logprobs = msgspec.json.encode(legacy).decode()
        return self._encode_event(choice, text, logprobs) if text or logprobs != "null" else ""

    def encode_end(self, finished: Finished) -> bytes:
        """Encode the finish reasons of all choices, the usage if requested, and the end of the stream."""
        ends = "".join(
            self._encode_event(choice, "", "null", f'"{reason}"')
            for choice, reason in enumerate(_list_reasons(finished, len(self._echoes)))
        )
        if self._spec.include_usage:
            ends += f'{self._head}],"usage":{msgspec.json.encode(build_usage(finished)).decode()}}}\n\n'
        return ends.encode() + DONE

    def encode_failure(self, problem: Problem) -> bytes:
        """Encode the error event that ends a failed stream, without `[DONE]`."""
        return problem.encode_event(self._spec.request_id)

    def _encode_event(self, choice: int, text: str, logprobs: str = "null", reason: str = "null") -> str:
        encoded = encode_basestring_ascii(text)
        about = f'{{"index":{choice},"text":{encoded},"logprobs":{logprobs},"finish_reason":{reason}}}'
        return self._head + about + self._tail


def encode_completion(spec: RequestSpec, answer: CompleteAnswer, finished: Finished, echoes: Sequence[str]) -> bytes:
    """Encode the complete answer to a request that does not stream.

    `echoes` has the text that precedes each choice, which may be empty.
    """
    reasons = _list_reasons(finished, len(echoes))
    choices = [
        {
            "index": choice,
            "text": echo + answer.texts.get((choice, Channel.CONTENT), ""),
            "logprobs": _build_logprobs(spec, answer, choice),
            "finish_reason": reasons[choice],
        }
        for choice, echo in enumerate(echoes)
    ]
    about = json.loads(f"{{{_render_head(spec)}}}")
    return msgspec.json.encode(about | {"choices": choices, "usage": build_usage(finished)})


def _render_head(spec: RequestSpec) -> str:
    return (
        f'"id":"cmpl-{spec.request_id}","object":"text_completion","created":{spec.created},'
        f'"model":{json.dumps(spec.demand.model)}'
    )


def _list_reasons(finished: Finished, choices: int) -> list[str]:
    reasons = (finished.reasons + ("stop",) * choices)[:choices]
    return ["length" if reason == "length" else "stop" for reason in reasons]


class LegacyLogprobs(msgspec.Struct, gc=False):
    """Field `choices[].logprobs` in the older format: parallel lists with one item for each token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: msgspec.Raw
    text_offset: list[int]


def _build_logprobs(spec: RequestSpec, answer: CompleteAnswer, choice: int) -> LegacyLogprobs | None:
    if not spec.params.logprobs:
        return None
    return convert_logprobs(answer.logprobs.get(choice, ()), spec.params.top_logprobs, 0)


def convert_logprobs(logprobs: Iterable[Logprob], top: int, offset: int) -> LegacyLogprobs:
    """Return log probabilities in the older format, with at most `top` alternatives for each token.

    `offset` is the number of characters before the first token. A token that is a part of a character is represented by
    its bytes, as in OpenAI's answers.
    """
    known = list(logprobs)
    alternatives = encoded_list(dict(_render_token(*each) for each in token.top[:top]) for token in known)
    legacy = LegacyLogprobs([], [], alternatives, [])
    for token in known:
        text, value = _render_token(token.token, token.logprob)
        legacy.tokens.append(text)
        legacy.token_logprobs.append(value)
        legacy.text_offset.append(offset)
        offset += len(text)
    return legacy


def _render_token(token: bytes, logprob: float) -> tuple[str, float]:
    text, value, token_bytes = render_token(token, logprob)
    if "\ufffd" in text:
        text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)
    return text, value
