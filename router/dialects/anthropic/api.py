"""`/v1/messages` and `/v1/messages/count_tokens`: convert Anthropic's bodies.

The result is the parts of a `Generate` frame, or a `CountTokens` frame.
"""

from dataclasses import replace
from typing import NamedTuple

from msgspec import structs

from router.dialects.anthropic.messages import convert_messages, list_omitted_parts
from router.dialects.anthropic.response import MessageChunks, encode_error, encode_message
from router.dialects.anthropic.schema import (
    COUNT,
    MESSAGES,
    AnthropicTool,
    CountBody,
    MessagesBody,
    ThinkingOptions,
    ToolChangeBlock,
    ToolDefinition,
)
from router.dialects.shared.common_fields import ForeignPart, list_stops, resolve_limit
from router.dialects.shared.conversation import ConversationRequest
from router.dialects.shared.field_table import sanitize_names
from router.dialects.shared.formats import add_call_constraints, convert_schema
from router.dialects.shared.interface import AnswerReader, DialectStyle
from router.dialects.shared.template import encode_variables
from router.dialects.shared.tools import (
    NO_TOOLS,
    OfferedTool,
    ToolSet,
    build_function,
    build_omitted_problem,
    collect_tools,
)
from router.dispatch.request import CompleteAnswer, RequestSpec
from router.dispatch.resource_demand import compute_demand
from router.errors import Problem, build_invalid
from wire.frames import CountTokens, Finished, GenerationParams, GrammarSpec, Message

ANTHROPIC = DialectStyle(encode_error, names=(b"request-id", b"x-request-id"))
NO_THREADS = "thread_unsupported_request"
"""Code of the refusal of the field `thread`, with which a client sends only its new messages.

After this code, Claude Code sends the request again with all messages, and sends no `thread` in the rest of the
session.
"""

NO_ANSWER = CompleteAnswer({}, {}, {})
"""Answer to a request that only puts its prompt into the prefix cache."""


class MessagesRequest(ConversationRequest, frozen=True, gc=False):
    """Parsed body of `/v1/messages`."""

    thoughts: bool = True
    """Whether the answer includes the reasoning."""
    warms: bool = False
    """Whether the request only puts its prompt into the prefix cache, because it has `max_tokens: 0`.

    One token is generated, but the answer does not have it.
    """

    def render_complete(self, spec: RequestSpec, answer: CompleteAnswer, finished: Finished) -> bytes:
        """Encode the complete answer; see `router.dialects.shared.interface.ParsedRequest`."""
        if self.warms:
            finished = structs.replace(finished, reasons=("length",), stops=(), completion_tokens=0, reasoning_tokens=0)
            return encode_message(spec, NO_ANSWER, finished, self.thoughts)
        return encode_message(spec, answer, finished, self.thoughts)

    def create_chunk_encoder(self, reader: AnswerReader) -> MessageChunks:
        """Return the encoder of the stream; see `router.dialects.shared.interface.ParsedRequest`."""
        return MessageChunks(reader.spec, reader.demand.prompt_tokens or 0, self.thoughts)


class MessagesRoute:
    """Dialect of `/v1/messages`.

    `strict` refuses unknown fields, and the tools and blocks that the prompt would otherwise omit.
    """

    style = ANTHROPIC

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict

    def parse(self, body: bytes, key: str) -> MessagesRequest | Problem:
        """Parse a body, or return a 400 problem; see `router.dialects.shared.interface.Dialect`."""
        parsed = MESSAGES.read(body, strict=self._strict)
        if isinstance(parsed, Problem):
            return replace(parsed, code=NO_THREADS) if parsed.param == "thread" else parsed
        return _build_request(parsed.body, parsed.ignored, strict=self._strict)


class CountRequest(NamedTuple):
    """Parsed body of `/v1/messages/count_tokens`.

    `tokens` is the frame for a node. It has the request number 0, which the sender replaces. `ignored` has the names of
    the ignored fields, tools and blocks.
    """

    tokens: CountTokens
    ignored: tuple[str, ...]


def parse_count(body: bytes, created: int, *, strict: bool = False) -> CountRequest | Problem:
    """Parse the body of `/v1/messages/count_tokens`. Return the request, or a 400 problem.

    `created` is the time of the request in Unix seconds. `strict` is that of `MessagesRoute`.
    """
    parsed = COUNT.read(body, strict=strict)
    if isinstance(parsed, Problem):
        return parsed
    parts = _convert_prompt(parsed.body, strict=strict)
    if isinstance(parts, Problem):
        return parts
    messages, tools, template = parts
    request = CountTokens(0, parsed.body.model, messages, created, tools.text, template)
    return CountRequest(request, sanitize_names([*parsed.ignored, *tools.left_out]))


def _build_request(body: MessagesBody, ignored: tuple[str, ...], *, strict: bool) -> MessagesRequest | Problem:
    parts = _convert_prompt(body, strict=strict)
    if isinstance(parts, Problem):
        return parts
    messages, tools, template = parts
    grammar = _build_grammar(body, tools)
    if isinstance(grammar, Problem):
        return grammar
    warms = body.max_tokens == 0
    if warms and body.stream:
        return build_invalid("max_tokens: 0 has no answer to stream: leave stream out", "stream")
    params = GenerationParams(
        grammar=grammar,
        max_tokens=1 if warms else resolve_limit(body.max_tokens),
        temperature=body.temperature,
        top_p=body.top_p,
        stop=list_stops(body.stop_sequences),
        top_k=None if body.top_k is None else max(0, body.top_k),
        one_call=body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use is True,
    )
    thoughts = body.thinking is None or body.thinking.display != "omitted"
    return MessagesRequest(
        compute_demand(body.model, messages, params, tools.text),
        messages,
        params,
        bool(body.stream),
        True,
        tools.text,
        frozenset(),
        template,
        body.session,
        sanitize_names([*ignored, *tools.left_out]),
        thoughts,
        warms,
    )


def _convert_prompt(body: CountBody, *, strict: bool) -> tuple[tuple[Message, ...], ToolSet, str] | Problem:
    """Return the parts of the prompt: messages, tools, and the variables of the template as JSON; or a 400 problem."""
    messages = convert_messages(body.system, body.messages)
    if isinstance(messages, Problem):
        return messages
    if not messages:
        return build_invalid("messages has only changes of tools: add a message", "messages")
    tools = _collect_tools(body, strict=strict)
    if isinstance(tools, Problem):
        return tools
    omitted = list_omitted_parts(body.messages)
    if omitted and strict:
        return build_omitted_problem(omitted[0])
    tools = tools._replace(left_out=(*tools.left_out, *omitted))
    effort = body.output_config.effort if body.output_config is not None else None
    template = encode_variables(
        None,
        reasoning_effort=effort,
        enable_thinking=_get_thinking_switch(body.thinking),
        continue_final_message=True if _is_prefilled(messages) else None,
    )
    return template if isinstance(template, Problem) else (tuple(messages), tools, template)


def _is_prefilled(messages: list[Message]) -> bool:
    """Return whether the last message begins the answer, which the model must continue."""
    last = messages[-1]
    return last.role == "assistant" and bool(last.content) and not last.tool_calls


def _get_thinking_switch(thinking: ThinkingOptions | None) -> bool | None:
    if thinking is None or thinking.type in ("adaptive", "between_tools"):
        return None
    return thinking.type == "enabled"


def _build_grammar(body: CountBody, tools: ToolSet) -> GrammarSpec | Problem | None:
    """Return the grammar of the answer, from its format and its forced calls; None if the answer is free."""
    form = None
    if body.output_config is not None and body.output_config.format is not None:
        form = convert_schema(body.output_config.format.schema_, "output_config.format.schema")
    elif body.output_format is not None:
        form = convert_schema(body.output_format.schema_, "output_format.schema")
    if isinstance(form, Problem):
        return form
    choice = body.tool_choice
    if choice is not None and (choice.type == "tool") != bool(choice.name):
        return build_invalid(
            "tool_choice.name is required with the type tool, and not allowed with other types", "tool_choice.name"
        )
    word = _WORDS.get("auto" if choice is None else choice.type, "auto")
    named = (choice.name or "") if choice is not None else ""
    return add_call_constraints(form, tools.names, word=word, named=named, strict=tools.strict)


_WORDS = {"any": "required", "tool": "required", "none": "none"}


def _collect_tools(body: CountBody, *, strict: bool) -> ToolSet | Problem:
    choice, tools = body.tool_choice, _apply_tool_changes(body)
    if choice is not None and not tools and choice.type != "none":
        return build_invalid("tool_choice needs tools: add tools, or leave tool_choice out", "tool_choice")
    if not tools:
        return NO_TOOLS
    offered = (_convert_tool(tool) for tool in tools if isinstance(tool, AnthropicTool))
    return collect_tools(offered, tools, strict=strict, include_text=choice is None or choice.type != "none")


def _apply_tool_changes(body: CountBody) -> list[AnthropicTool | ForeignPart]:
    """Return the tools of the request after all additions and removals in its conversation."""
    given = list(body.tools or ())
    changes = [
        block
        for message in body.messages
        for block in message.content
        if isinstance(block, ToolChangeBlock) and not isinstance(block.tool, ForeignPart)
    ]
    if not changes:
        return given
    known = {tool.name if isinstance(tool, AnthropicTool) else str(at): tool for at, tool in enumerate(given)}
    removed: set[str] = set()
    for change in changes:
        tool = change.tool.definition if isinstance(change.tool, ToolDefinition) else change.tool
        name = str(getattr(tool, "name", ""))
        if change.type == "tool_removal":
            removed.add(name)
            continue
        removed.discard(name)
        if isinstance(tool, AnthropicTool):
            known[name] = tool
    return [tool for name, tool in known.items() if name not in removed]


def _convert_tool(tool: AnthropicTool) -> OfferedTool:
    return OfferedTool(
        build_function(tool.name, tool.description, tool.input_schema, strict=tool.strict), bool(tool.strict)
    )
