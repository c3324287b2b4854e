"""`/v1/responses`: convert deltas and usage to OpenAI's newer answer, as one object or as numbered events.

An answer is a list of items: the reasoning, the text, and each call. In a stream, each item is added, filled and
finished before the next, and the last event repeats the complete answer.
"""

from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import cast

import msgspec

from router.dialects.openai.responses_schema import ResponsesBody
from router.dialects.shared.common_fields import resolve_limit
from router.dialects.shared.interface import encode_comment
from router.dialects.shared.single_choice import SingleChoiceAnswer, StreamSplitter, assemble_answer
from router.dialects.shared.strict_json import Body
from router.dialects.shared.tool_calls import AnswerToolCall
from router.dialects.shared.tool_shapes import convert_to_responses
from router.dialects.shared.tools import ClientTool, decode_input
from router.dispatch.request import CompleteAnswer, RequestSpec
from router.errors import Problem
from wire.frames import Channel, Delta, Finished
from wire.refusals import FailureCode

Shape = dict[str, object]
_PREFIX = {Channel.CONTENT: "msg", Channel.REASONING: "rs", Channel.TOOL_CALL: "fc"}


class ResponseMeta:
    """Fields of a request that each answer of `/v1/responses` repeats.

    `name` is the id of the answer without its prefix. `body` is the validated body. `fields` is the body as received,
    for its `text`, `tool_choice` and `tools`. `origins` maps the names of functions to the tools of the client
    (`ToolSet.origins`).
    """

    def __init__(self, name: str, body: ResponsesBody, fields: Body, origins: Mapping[str, ClientTool]) -> None:
        self.name = name
        self._origins = origins
        text = cast("Body", fields.get("text") or {})
        self._echo: Shape = {
            "instructions": body.instructions,
            "max_output_tokens": resolve_limit(body.max_output_tokens),
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
            "store": body.store is not False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}} | {key: value for key, value in text.items() if value is not None},
            "tool_choice": fields.get("tool_choice") or "auto",
            "tools": [convert_to_responses(tool) for tool in cast("list[object]", fields.get("tools") or [])],
            "top_p": body.top_p,
            "truncation": "disabled",
            "background": False,
        }

    def build_body(self, spec: RequestSpec, status: str, output: list[Shape], **more: object) -> Shape:
        """Return an answer as a JSON object, with the status `status` and the items `output`.

        `more` sets further fields by name, in place of their defaults.
        """
        return {
            "id": f"resp_{self.name}",
            "object": "response",
            "created_at": spec.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": spec.demand.model,
            "output": output,
            "usage": None,
            **self._echo,
            **more,
        }

    def build_finished_body(self, spec: RequestSpec, output: list[Shape], finished: Finished) -> Shape:
        """Return a finished answer as a JSON object, with its usage.

        An answer that the token limit ended has the status `incomplete`.
        """
        cut = is_cut_short(finished)
        return self.build_body(
            spec,
            "incomplete" if cut else "completed",
            output,
            incomplete_details={"reason": "max_output_tokens"} if cut else None,
            usage=build_usage(finished),
        )

    def build_call_item(self, name: str, status: str, call: AnswerToolCall, *, begun: bool = False) -> Shape:
        """Return the output item of a tool call, with the client's own name and type of the tool.

        `name` is the id of the item. If the call has only `begun`, its arguments or its input are empty.
        """
        origin = self._origins.get(call.name, ClientTool(call.name))
        where: Shape = {"namespace": origin.namespace} if origin.namespace else {}
        about: Shape = {"id": name, "call_id": call.id, "name": origin.name, "status": status, **where}
        if origin.custom:
            return {"type": "custom_tool_call", "input": "" if begun else decode_input(call), **about}
        return {"type": "function_call", "arguments": "" if begun else call.arguments, **about}

    def get_item_id(self, at: int, channel: Channel) -> str:
        """Return the id of the output item at position `at` of the answer."""
        return f"{_PREFIX[channel]}_{self.name}_{at}"


def is_cut_short(finished: Finished) -> bool:
    """Return whether the token limit ended the answer."""
    return bool(finished.reasons) and finished.reasons[0] == "length"


def build_output(outline: ResponseMeta, assembled: SingleChoiceAnswer, *, cut: bool) -> list[Shape]:
    """Return the output items of a complete answer: reasoning, text, and calls.

    `cut` tells whether the token limit ended the answer. Its last item is then incomplete, unless it is a call.
    """
    output: list[Shape] = []
    for channel, text in ((Channel.REASONING, assembled.reasoning), (Channel.CONTENT, assembled.content)):
        if text:
            output.append(_build_text_item(channel, outline.get_item_id(len(output), channel), "completed", text))
    if cut and output and not assembled.calls:
        output[-1]["status"] = "incomplete"
    for call in assembled.calls:
        output.append(outline.build_call_item(outline.get_item_id(len(output), Channel.TOOL_CALL), "completed", call))
    return output


def build_usage(finished: Finished) -> Shape:
    """Return the token counts of a finished request in the format of `/v1/responses`."""
    return {
        "input_tokens": finished.prompt_tokens,
        "input_tokens_details": {"cached_tokens": finished.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": finished.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": finished.reasoning_tokens},
        "total_tokens": finished.prompt_tokens + finished.completion_tokens,
    }


def encode_response(
    outline: ResponseMeta, spec: RequestSpec, answer: CompleteAnswer, finished: Finished
) -> tuple[bytes, SingleChoiceAnswer]:
    """Return the complete answer to a request that does not stream, as JSON, and its content.

    Only the first choice is part of it. Invalid calls, and calls above `MAX_CALLS_SENT`, are omitted. The last item of
    an answer that the token limit ended is `incomplete`, unless it is a call.
    """
    assembled = assemble_answer(answer)
    output = build_output(outline, assembled, cut=is_cut_short(finished))
    return msgspec.json.encode(outline.build_finished_body(spec, output, finished)), assembled


class ResponseChunks:
    """Encoder of one streamed answer into numbered events.

    `on_end` is called at the end of the answer with its JSON and its content, even if it failed or its client
    disconnected.
    """

    def __init__(
        self, outline: ResponseMeta, spec: RequestSpec, on_end: Callable[[bytes, SingleChoiceAnswer], None]
    ) -> None:
        self._outline = outline
        self._spec = spec
        self._on_end = on_end
        self._number = 0
        self._pieces = StreamSplitter()
        self._output: list[Shape] = []
        self._open: Channel | None = None
        self._text: list[str] = []
        self._texts: dict[Channel, list[str]] = {Channel.CONTENT: [], Channel.REASONING: []}
        self._calls: list[AnswerToolCall] = []

    def encode_keepalive(self, why: str) -> bytes:
        """Encode a server-sent comment with the reason of a wait (`why`), which may be empty."""
        return encode_comment(why)

    def encode_opening(self) -> bytes:
        """Encode the events that announce the answer, which has no items yet."""
        begun = self._outline.build_body(self._spec, "in_progress", [])
        return self._encode_event("response.created", response=begun) + self._encode_event(
            "response.in_progress", response=begun
        )

    def encode_deltas(self, deltas: Iterable[Delta]) -> bytes:
        """Encode the deltas of the first choice as events of output items; empty if they add nothing to an item."""
        events = b""
        for channel, text, call in self._pieces.split(deltas):
            if call is not None:
                events += self._encode_call(call)
                continue
            if self._open is not channel:
                events += self._close() + self._begin(channel)
            self._text.append(text)
            events += self._encode_part_event(
                _NAMES[channel] + ".delta", channel, {"delta": text, **_LOGPROBS[channel]}
            )
        return events

    def encode_end(self, finished: Finished) -> bytes:
        """Encode the end of a complete stream, and call `on_end`. The last event repeats the complete answer."""
        events = self._close("incomplete" if is_cut_short(finished) else "completed")
        body = self._outline.build_finished_body(self._spec, self._output, finished)
        self._store(body)
        return events + self._encode_event(f"response.{body['status']}", response=body)

    def encode_failure(self, problem: Problem) -> bytes:
        """Encode the end of the open item and the event that ends a failed stream, with the items so far.

        The event has the reason, unless the client has disconnected. `on_end` is called, because the next request may
        refer to items that the client has.
        """
        code = "rate_limit_exceeded" if problem.status == HTTPStatus.TOO_MANY_REQUESTS else "server_error"
        error = {"code": code, "message": problem.message, "type": problem.code}
        has_left = problem.code == FailureCode.CANCELLED
        events = self._close("incomplete")
        status, reason = ("cancelled", None) if has_left else ("failed", error)
        body = self._outline.build_body(self._spec, status, self._output, error=reason)
        self._store(body)
        return events + self._encode_event("response.failed", response=body)

    def _store(self, body: Shape) -> None:
        reasoning, content = ("".join(self._texts[channel]) for channel in (Channel.REASONING, Channel.CONTENT))
        self._on_end(msgspec.json.encode(body), SingleChoiceAnswer(reasoning, content, self._calls))

    def _begin(self, channel: Channel) -> bytes:
        self._open, self._text = channel, []
        item = _build_text_item(channel, self._get_item_id(channel), "in_progress", None)
        added = self._encode_event("response.output_item.added", output_index=len(self._output), item=item)
        return added + self._encode_part_event(
            "response.content_part.added", channel, {"part": _build_part(channel, "")}
        )

    def _close(self, status: str = "completed") -> bytes:
        channel, self._open = self._open, None
        if channel is None:
            return b""
        text = "".join(self._text)
        self._texts[channel].append(text)
        item = _build_text_item(channel, self._get_item_id(channel), status, text)
        done = self._encode_part_event(_NAMES[channel] + ".done", channel, {"text": text, **_LOGPROBS[channel]})
        done += self._encode_part_event("response.content_part.done", channel, {"part": _build_part(channel, text)})
        return done + self._finish_item(item)

    def _encode_call(self, call: AnswerToolCall) -> bytes:
        before = self._close()
        self._calls.append(call)
        name, at = self._get_item_id(Channel.TOOL_CALL), len(self._output)
        begun, item = (
            self._outline.build_call_item(name, status, call, begun=status == "in_progress") for status in _CALLED
        )
        added = self._encode_event("response.output_item.added", output_index=at, item=begun)
        where: Shape = {"item_id": name, "output_index": at}
        if "input" in item:
            filled = self._encode_event("response.custom_tool_call_input.delta", delta=item["input"], **where)
            filled += self._encode_event("response.custom_tool_call_input.done", input=item["input"], **where)
        else:
            filled = self._encode_event("response.function_call_arguments.delta", delta=call.arguments, **where)
            filled += self._encode_event(
                "response.function_call_arguments.done", arguments=call.arguments, name=item["name"], **where
            )
        return before + added + filled + self._finish_item(item)

    def _finish_item(self, item: Shape) -> bytes:
        self._output.append(item)
        return self._encode_event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _encode_part_event(self, kind: str, channel: Channel, parts: Shape) -> bytes:
        """Return an event about the single part of the current item."""
        return self._encode_event(
            kind, item_id=self._get_item_id(channel), output_index=len(self._output), content_index=0, **parts
        )

    def _get_item_id(self, channel: Channel) -> str:
        return self._outline.get_item_id(len(self._output), channel)

    def _encode_event(self, kind: str, **parts: object) -> bytes:
        body = msgspec.json.encode({"type": kind, "sequence_number": self._number, **parts})
        self._number += 1
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), body)


_CALLED = ("in_progress", "completed")
_NAMES = {Channel.CONTENT: "response.output_text", Channel.REASONING: "response.reasoning_text"}
_LOGPROBS: dict[Channel, Shape] = {Channel.CONTENT: {"logprobs": []}, Channel.REASONING: {}}


def _build_part(channel: Channel, text: str) -> Shape:
    if channel is Channel.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _build_text_item(channel: Channel, name: str, status: str, text: str | None) -> Shape:
    content = [] if text is None else [_build_part(channel, text)]
    if channel is Channel.REASONING:
        return {"type": "reasoning", "id": name, "status": status, "summary": [], "content": content}
    return {"type": "message", "id": name, "status": status, "role": "assistant", "content": content}
