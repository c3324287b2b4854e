"""`/api/chat` and `/api/generate`: convert Ollama's bodies to the parts of a `Generate` frame."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

from msgspec import structs

from router.admission.request_limits import MAX_CALLS, MAX_TOKENS, MAX_TOOLS_BYTES
from router.dialects.ollama.response import OLLAMA, AnswerShape, OllamaChunks, encode_answer, encode_load
from router.dialects.ollama.schema import (
    CHAT,
    GENERATE,
    OPTIONS,
    OllamaBody,
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaMessage,
)
from router.dialects.openai.chat_schema import ChatTool
from router.dialects.shared.common_fields import list_stops, resolve_seed
from router.dialects.shared.conversation import ConversationRequest
from router.dialects.shared.field_table import sanitize_names
from router.dialects.shared.formats import convert_schema
from router.dialects.shared.interface import AnswerReader
from router.dialects.shared.strict_json import Body, encode_json, read_object
from router.dialects.shared.template import encode_variables
from router.dialects.shared.tool_shapes import convert_to_chat
from router.dialects.shared.tools import NO_TOOLS, OfferedTool, ToolSet, clean_function, collect_tools
from router.dispatch.request import CompleteAnswer, RequestSpec
from router.dispatch.resource_demand import compute_demand, compute_plain_demand
from router.errors import Problem, build_invalid
from wire.frames import CallConstraint, Finished, GenerationParams, GrammarKind, GrammarSpec, Message, ToolCall

_ZERO = re.compile(r"-?0+(\.0*)?(ns|us|ms|s|m|h)?")
LOADING = (Message("user", "Hello"),)
"""Conversation of a request that only loads a model. Its answer of one token is not sent."""
MAX_WAITING_CALLS = 2 * MAX_CALLS
"""Maximum number of calls without a result to which the results in an Ollama conversation are matched.

Of more calls, the newest are kept.
"""


class OllamaRequest(ConversationRequest, frozen=True, gc=False):
    """Parsed body of `/api/chat` or `/api/generate`."""

    chat: bool = True
    """Whether the route is `/api/chat`."""
    text: str = ""
    """Raw prompt without a template; empty for a conversation."""
    loads: bool = False
    """Whether the body has no prompt, and only loads the model."""

    def to_spec(self, key: str, request_id: str, created: int) -> RequestSpec:
        """Return the request for the dispatcher; see `ConversationRequest`."""
        return RequestSpec(
            self.demand,
            key,
            request_id,
            self.messages,
            self.params,
            created,
            self.stream,
            self.tools,
            self.template,
            include_usage=True,
            text=self.text,
            ignored=self.ignored,
            set_penalties=self.set_penalties,
        )

    def render_complete(self, spec: RequestSpec, answer: CompleteAnswer, finished: Finished) -> bytes:
        """Encode the complete answer; see `router.dialects.shared.interface.ParsedRequest`."""
        shape = AnswerShape(spec, self.chat)
        return encode_load(shape) if self.loads else encode_answer(shape, answer, finished)

    def create_chunk_encoder(self, reader: AnswerReader) -> OllamaChunks:
        """Return the encoder of the stream; see `router.dialects.shared.interface.ParsedRequest`."""
        return OllamaChunks(AnswerShape(reader.spec, self.chat))


class OllamaChatRoute:
    """Dialect of `/api/chat`.

    `strict` refuses unknown fields and options, and the tools that the prompt would otherwise omit.
    """

    style = OLLAMA

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict

    def parse(self, body: bytes, key: str) -> OllamaRequest | Problem:
        """Parse a body, or return a problem; see `router.dialects.shared.interface.Dialect`.

        A body without messages loads the model. The problem has the status 501 for such a body with `keep_alive: 0`,
        and 400 for any other body.
        """
        parsed = CHAT.read(body, strict=self._strict)
        if isinstance(parsed, Problem):
            return parsed
        if not parsed.body.messages:
            return _build_load(parsed.body, body, parsed.ignored, strict=self._strict, chat=True)
        messages = _convert_messages(parsed.body.messages)
        if isinstance(messages, Problem):
            return messages
        tools = _collect_tools(parsed.body, parsed.fields, strict=self._strict)
        if isinstance(tools, Problem):
            return tools
        return _build_request(parsed.body, messages, tools, parsed.ignored, strict=self._strict)


class OllamaGenerateRoute:
    """Dialect of `/api/generate`. `strict` refuses unknown fields and options."""

    style = OLLAMA

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict

    def parse(self, body: bytes, key: str) -> OllamaRequest | Problem:
        """Parse a body, or return a problem; see `router.dialects.shared.interface.Dialect`.

        A body without a prompt loads the model. The problem has the status 501 for such a body with `keep_alive: 0`,
        and 400 for any other body.
        """
        parsed = GENERATE.read(body, strict=self._strict)
        if isinstance(parsed, Problem):
            return parsed
        if not parsed.body.prompt:
            return _build_load(parsed.body, body, parsed.ignored, strict=self._strict, chat=False)
        return _generate(parsed.body, parsed.body.prompt, parsed.ignored, strict=self._strict)


def strip_latest_tag(model: str) -> str:
    """Return the name of a model without `:latest`, which Ollama's clients append to a name without a tag."""
    return model.removesuffix(":latest") or model


def check_unload(raw: bytes) -> Problem | None:
    """Return a 501 problem if the JSON body `raw` has `keep_alive: 0`, else None.

    Call this function only for a body without a prompt. With `keep_alive: 0`, such a body makes Ollama unload the
    model.
    """
    fields = read_object(raw, CHAT.max_values)
    if not isinstance(fields, dict) or not _ZERO.fullmatch(str(fields.get("keep_alive"))):
        return None
    text = "keep_alive: 0 without a prompt is not supported: unload models with `cluster model unload`"
    return Problem(501, "unsupported_operation", text, "keep_alive")


def _build_load(
    body: OllamaBody, raw: bytes, ignored: tuple[str, ...], *, strict: bool, chat: bool
) -> OllamaRequest | Problem:
    """Return the request of a body without a prompt, which loads the model, as with Ollama.

    `raw` is the JSON of the body. Return a problem if the body is invalid, or asks to unload the model
    (`check_unload`).
    """
    unload = check_unload(raw)
    if unload is not None:
        return unload
    built = _build_request(body, list(LOADING), NO_TOOLS, ignored, strict=strict, chat=chat)
    if isinstance(built, Problem):
        return built
    params = GenerationParams(max_tokens=1)
    return structs.replace(
        built,
        demand=compute_demand(built.demand.model, LOADING, params),
        params=params,
        set_penalties=frozenset(),
        stream=False,
        loads=True,
    )


def _generate(
    body: OllamaGenerateBody, prompt: str, ignored: tuple[str, ...], *, strict: bool
) -> OllamaRequest | Problem:
    if not body.raw:
        system = [Message("system", body.system)] if body.system else []
        messages = [*system, Message("user", prompt)]
        return _build_request(body, messages, NO_TOOLS, ignored, strict=strict, chat=False)
    if body.system:
        return build_invalid("system cannot be combined with raw: true: put the system prompt into prompt", "system")
    return _build_request(body, [], NO_TOOLS, ignored, strict=strict, chat=False, text=prompt)


def _build_request(
    body: OllamaBody,
    messages: list[Message],
    tools: ToolSet,
    ignored: tuple[str, ...],
    *,
    strict: bool,
    chat: bool = True,
    text: str = "",
) -> OllamaRequest | Problem:
    drawn = _parse_options(body.options or {}, strict=strict)
    if isinstance(drawn, Problem):
        return drawn
    params, set_penalties, unread = drawn
    form = convert_schema(body.format, "format") if isinstance(body.format, dict) else None
    grammar = GrammarSpec(GrammarKind.JSON_OBJECT) if body.format == "json" else form
    if isinstance(grammar, Problem):
        return grammar
    if grammar is not None:
        params = structs.replace(
            params, grammar=grammar if not tools.text else structs.replace(grammar, calls=CallConstraint.FREE)
        )
    effort = body.think if isinstance(body.think, str) else None
    thinks = body.think if isinstance(body.think, bool) else True if effort else None
    template = "" if text else encode_variables(None, reasoning_effort=effort, enable_thinking=thinks)
    if isinstance(template, Problem):
        return template
    model = strip_latest_tag(body.model)
    demand = (
        compute_plain_demand(model, text, (), params) if text else compute_demand(model, messages, params, tools.text)
    )
    stream = body.stream is not False
    return OllamaRequest(
        demand,
        tuple(messages),
        params,
        stream,
        True,
        tools.text,
        set_penalties,
        template,
        chat=chat,
        text=text,
        ignored=sanitize_names([*ignored, *unread, *tools.left_out]),
    )


def _parse_options(
    options: dict[str, Any], *, strict: bool
) -> tuple[GenerationParams, frozenset[str], list[str]] | Problem:
    """Return the sampling parameters, the names of the penalties that are set, and the ignored options."""
    parsed = OPTIONS.parse(options, strict=strict)
    if isinstance(parsed, Problem):
        return replace(parsed, param=f"options.{parsed.param}")
    drawn = parsed.body
    most = drawn.num_predict or 0
    params = GenerationParams(
        max_tokens=min(most, MAX_TOKENS) if most > 0 else None,
        temperature=drawn.temperature,
        top_p=drawn.top_p,
        seed=resolve_seed(drawn.seed),
        stop=list_stops(drawn.stop),
        top_k=None if drawn.top_k is None else max(0, drawn.top_k),
        min_p=drawn.min_p,
        presence_penalty=drawn.presence_penalty or 0.0,
        frequency_penalty=drawn.frequency_penalty or 0.0,
        repetition_penalty=1.0 if drawn.repeat_penalty is None else drawn.repeat_penalty,
    )
    penalties = {
        "presence_penalty": drawn.presence_penalty,
        "frequency_penalty": drawn.frequency_penalty,
        "repetition_penalty": drawn.repeat_penalty,
    }
    set_penalties = frozenset(name for name, value in penalties.items() if value is not None)
    return params, set_penalties, [f"options.{name}" for name in parsed.ignored]


def _collect_tools(body: OllamaChatBody, sent: Body, *, strict: bool) -> ToolSet | Problem:
    raw = [cast("Body", convert_to_chat(tool)) for tool in cast("list[object]", sent.get("tools") or [])]
    offered = (
        OfferedTool(clean_function(raw[at])) for at, tool in enumerate(body.tools or ()) if isinstance(tool, ChatTool)
    )
    return collect_tools(offered, body.tools, strict=strict)


def _convert_messages(body_messages: Iterable[OllamaMessage]) -> list[Message] | Problem:
    """Return the messages of a frame, or a 400 problem.

    Calls in Ollama's format may lack ids. Results are matched to such calls by name and order.
    """
    messages: list[Message] = []
    waiting: dict[str, str] = {}
    for at, message in enumerate(body_messages):
        calls = _convert_calls(message, at)
        if isinstance(calls, Problem):
            return calls
        waiting |= {call.id: call.name for call in calls}
        while len(waiting) > MAX_WAITING_CALLS:
            del waiting[next(iter(waiting))]
        name = message.tool_name or message.name or ""
        answers = (message.tool_call_id or _find_answered_call(waiting, name)) if message.role == "tool" else ""
        waiting.pop(answers, None)
        messages.append(
            Message(message.role, message.content or "", name, tuple(calls), answers, message.thinking or "")
        )
    return messages


def _find_answered_call(waiting: Mapping[str, str], name: str) -> str:
    """Return the id of the first call without a result, with the name `name` unless that is empty; empty if none."""
    return next((call for call, called in waiting.items() if not name or called == name), "")


def _convert_calls(message: OllamaMessage, at: int) -> list[ToolCall] | Problem:
    calls: list[ToolCall] = []
    for place, call in enumerate(message.tool_calls or ()):
        path = f"messages[{at}].tool_calls[{place}].function.arguments"
        text = encode_json(call.function.arguments or {}, path, MAX_TOOLS_BYTES)
        if isinstance(text, Problem):
            return text
        calls.append(ToolCall(call.id or f"call_{at}_{place}", call.function.name, text))
    return calls
