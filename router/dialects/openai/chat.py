"""`/v1/chat/completions`: convert a body in OpenAI's format to the parts of a `Generate` frame.

A body that the fast parser (`chat_fast_parse`) cannot read is validated by pydantic (`chat_schema`). An invalid body
gives a 400 problem, which names the wrong parameter if that is known.
"""

from functools import lru_cache
from typing import cast

from router.dialects.openai import chat_fast_parse
from router.dialects.openai.chat_messages import convert_messages, list_omitted_parts
from router.dialects.openai.chat_response import ChatChunks, encode_completion
from router.dialects.openai.chat_schema import CHAT, ChatBody, ChatCustomTool, ChatTool
from router.dialects.shared.common_fields import (
    ForeignPart,
    build_params,
    list_given_penalties,
    parse_stream_options,
    resolve_limit,
)
from router.dialects.shared.conversation import ConversationRequest
from router.dialects.shared.field_table import sanitize_names
from router.dialects.shared.formats import add_call_constraints
from router.dialects.shared.interface import OPENAI, AnswerReader
from router.dialects.shared.strict_json import Body
from router.dialects.shared.template import combine_reasoning, encode_variables
from router.dialects.shared.tool_choice import convert_tool_choice
from router.dialects.shared.tool_shapes import convert_to_chat
from router.dialects.shared.tools import (
    ClientTool,
    OfferedTool,
    ToolSet,
    build_custom_function,
    build_omitted_problem,
    clean_function,
    collect_tools,
)
from router.dispatch.request import CompleteAnswer, RequestSpec
from router.dispatch.resource_demand import compute_demand
from router.errors import Problem, build_invalid
from wire.frames import Finished, GrammarSpec

MAX_CACHED_TOOLS = 64
"""Maximum number of cached lists of tools, each of at most `chat_fast_parse.MAX_BODY_BYTES` bytes."""
_ONLY_TOOLS = b'{"model":"m","messages":[{"role":"user","content":""}],"tools":%s}'


class ChatRequest(ConversationRequest, frozen=True, gc=False):
    """Parsed body of `/v1/chat/completions`. `custom` has the names of its custom tools; other tools are functions."""

    custom: frozenset[str] = frozenset()

    def render_complete(self, spec: RequestSpec, answer: CompleteAnswer, finished: Finished) -> bytes:
        """Encode the complete answer; see `router.dialects.shared.interface.ParsedRequest`."""
        return encode_completion(spec, answer, finished, self.custom)

    def create_chunk_encoder(self, reader: AnswerReader) -> ChatChunks:
        """Return the encoder of the stream; see `router.dialects.shared.interface.ParsedRequest`."""
        return ChatChunks(reader.spec, self.custom, reader.fingerprint)


class ChatRoute:
    """Dialect of `/v1/chat/completions`.

    `strict` refuses unknown fields, and the tools and parts that the prompt would otherwise omit.
    """

    style = OPENAI

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict

    def parse(self, body: bytes, key: str) -> ChatRequest | Problem:
        """Parse a body, or return a 400 problem; see `router.dialects.shared.interface.Dialect`."""
        return parse(body, strict=self._strict)


def parse(body: bytes, *, strict: bool = False) -> ChatRequest | Problem:
    """Parse a body with the fast or the complete parser. Return the request, or a 400 problem.

    `body` is JSON in UTF-8. `strict` is that of `ChatRoute`.
    """
    plain = chat_fast_parse.read(body, encode_plain_tools, ChatRequest)
    return parse_wholly(body, strict=strict) if plain is None else plain


@lru_cache(MAX_CACHED_TOOLS)
def encode_plain_tools(raw: bytes) -> str | None:
    """Return the functions of a body's field `tools` as JSON for the engine. `raw` is the JSON of the field.

    Return None for an empty list, and if a tool is invalid, custom, strict, or would be omitted. Results are cached,
    because agents repeat their tools.
    """
    request = parse_wholly(_ONLY_TOOLS % raw)
    if isinstance(request, Problem) or not request.tools or request.ignored or request.custom or request.params.grammar:
        return None
    return request.tools


def parse_wholly(body: bytes, *, strict: bool = False) -> ChatRequest | Problem:
    """Parse a body with the complete parser only. Return the request, or a 400 problem.

    `strict` is that of `ChatRoute`.
    """
    request = CHAT.read(body, strict=strict)
    return (
        request
        if isinstance(request, Problem)
        else _build_request(request.body, request.fields, request.ignored, strict=strict)
    )


def _build_request(body: ChatBody, fields: Body, ignored: tuple[str, ...], *, strict: bool) -> ChatRequest | Problem:
    """Return the request of a validated body, or a 400 problem. `fields` is the body as a JSON object."""
    messages = convert_messages(body.messages)
    if isinstance(messages, Problem):
        return messages
    tools = _collect_tools(body, fields, strict=strict)
    if isinstance(tools, Problem):
        return tools
    omitted = list_omitted_parts(body.messages)
    if omitted and strict:
        return build_omitted_problem(omitted[0])
    reasoning_options = {"thinking": body.thinking, "think": body.think, "reasoning": body.reasoning}
    effort, thinks, unread = combine_reasoning(body.reasoning_effort, body.enable_thinking, reasoning_options)
    template = encode_variables(body.chat_template_kwargs, reasoning_effort=effort, enable_thinking=thinks)
    if isinstance(template, Problem):
        return template
    include_usage = parse_stream_options(body)
    if isinstance(include_usage, Problem):
        return include_usage
    include_usage = include_usage or (bool(body.stream) and _has_usage_flag(body.usage))
    if body.top_logprobs and not body.logprobs:
        return build_invalid("top_logprobs needs logprobs: true", "top_logprobs")
    grammar = _build_grammar(body, tools)
    if isinstance(grammar, Problem):
        return grammar
    params = build_params(
        body,
        resolve_limit(body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens),
        logprobs=body.top_logprobs or 0 if body.logprobs else None,
        one_call=body.parallel_tool_calls is False,
        grammar=grammar,
    )
    return ChatRequest(
        compute_demand(body.model, messages, params, tools.text),
        messages,
        params,
        bool(body.stream),
        include_usage,
        tools.text,
        list_given_penalties(body),
        template,
        body.session,
        sanitize_names([*ignored, *unread, *tools.left_out, *omitted]),
        frozenset(tools.origins),
    )


def _build_grammar(body: ChatBody, tools: ToolSet) -> GrammarSpec | Problem | None:
    """Return the grammar of the answer, from its format and its forced calls; None if the answer is free."""
    form = body.build_grammar()
    if isinstance(form, Problem):
        return form
    rule = convert_tool_choice(body.tool_choice)
    return add_call_constraints(form, tools.names, word=rule.word, named=rule.named, strict=tools.strict)


def _collect_tools(body: ChatBody, fields: Body, *, strict: bool) -> ToolSet | Problem:
    """Return the tools in order, without text for the prompt if no tool may be called; or a 400 problem."""
    raw = [cast("Body", convert_to_chat(tool)) for tool in cast("list[object]", fields.get("tools") or [])]
    offered = (
        _convert_tool(tool, raw[at]) for at, tool in enumerate(body.tools or ()) if not isinstance(tool, ForeignPart)
    )
    rule = convert_tool_choice(body.tool_choice)
    return collect_tools(offered, body.tools, strict=strict, include_text=rule.word != "none", allowed=rule.allowed)


def _convert_tool(tool: ChatTool | ChatCustomTool, raw: Body) -> OfferedTool:
    if isinstance(tool, ChatTool):
        return OfferedTool(clean_function(raw), bool(tool.function.strict))
    custom = tool.custom
    return OfferedTool(
        build_custom_function(custom.name, custom.description, custom.format),
        origin=ClientTool(custom.name, custom=True),
    )


def _has_usage_flag(usage: object) -> bool:
    """Return whether `usage.include` is true, OpenRouter's form of `stream_options.include_usage`."""
    return isinstance(usage, dict) and cast("Body", usage).get("include") is True
