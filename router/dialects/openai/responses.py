"""`/v1/responses`: convert items to the parts of a `Generate` frame, which may continue a stored conversation."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import cast
from urllib.parse import parse_qs

import msgspec

from router.dialects.openai.responses_input import convert_items, list_omitted_items, list_omitted_parts
from router.dialects.openai.responses_response import ResponseChunks, ResponseMeta, encode_response
from router.dialects.openai.responses_schema import (
    RESPONSES,
    CallItem,
    CustomCallItem,
    FunctionTool,
    InputItem,
    Item,
    ItemReference,
    MessageItem,
    Namespace,
    ReasoningItem,
    ResponsesBody,
    ResponsesCustomTool,
    SchemaFormat,
    ToolsItem,
)
from router.dialects.openai.responses_store import OutputItems, ResponseStore, build_stored_response
from router.dialects.shared.common_fields import ForeignPart, resolve_limit
from router.dialects.shared.conversation import ConversationRequest
from router.dialects.shared.field_table import sanitize_names
from router.dialects.shared.formats import JsonObject, add_call_constraints, convert_schema
from router.dialects.shared.interface import OPENAI, AnswerReader
from router.dialects.shared.single_choice import SingleChoiceAnswer
from router.dialects.shared.strict_json import Body
from router.dialects.shared.template import encode_variables, get_reasoning_variables
from router.dialects.shared.tool_choice import convert_tool_choice
from router.dialects.shared.tools import (
    ClientTool,
    OfferedTool,
    ToolSet,
    build_custom_function,
    build_function,
    build_omitted_problem,
    collect_tools,
)
from router.dispatch.request import CompleteAnswer, RequestSpec
from router.dispatch.resource_demand import compute_demand
from router.errors import Problem, build_invalid
from wire.frames import Finished, GenerationParams, GrammarKind, GrammarSpec, Message, ToolCall

_UNSUPPORTED: Mapping[str, str] = {
    "cancel": "a request ends when its client closes the connection",
    "compact": "send fewer or shorter items",
    "input_items": "send the items with each request, or refer to their answer by previous_response_id",
    "input_tokens": "/v1/messages/count_tokens counts the tokens of a conversation",
}
"""Alternatives to OpenAI's routes that are not supported, by the last part of the path of the route."""


class ResponsesRequest(ConversationRequest, frozen=True):
    """Parsed body of `/v1/responses`, with the store for its answer."""

    outline: ResponseMeta | None = None
    """Fields of the request that the answer repeats, which `ResponsesRoute.parse` always sets."""
    conversation: tuple[Message, ...] = ()
    """Conversation before the answer, without the instructions."""
    store: ResponseStore | None = None
    """Store for the answer; None if the answer will not be stored."""
    items: OutputItems | None = None
    """Store for the items of the answer; None if the answer will not be stored."""
    key: str = ""
    """Id of the API key."""

    def render_complete(self, spec: RequestSpec, answer: CompleteAnswer, finished: Finished) -> bytes:
        """Encode the complete answer, and store it unless the request forbids that.

        See `router.dialects.shared.interface.ParsedRequest`.
        """
        body, assembled = encode_response(cast("ResponseMeta", self.outline), spec, answer, finished)
        self._store_answer(body, assembled)
        return body

    def create_chunk_encoder(self, reader: AnswerReader) -> ResponseChunks:
        """Return the encoder of the stream; see `router.dialects.shared.interface.ParsedRequest`."""
        return ResponseChunks(cast("ResponseMeta", self.outline), reader.spec, self._store_answer)

    def _store_answer(self, body: bytes, assembled: SingleChoiceAnswer) -> None:
        if self.store is None or self.items is None or self.outline is None:
            return
        calls = tuple(ToolCall(call.id, call.name, call.arguments) for call in assembled.calls)
        last = Message("assistant", assembled.content, tool_calls=calls, reasoning=assembled.reasoning)
        name = f"resp_{self.outline.name}"
        self.store.put(self.key, name, build_stored_response(body, (*self.conversation, last)))
        self.items.put(self.key, name, body)


class ResponsesRoute:
    """Dialect of `/v1/responses`, with its stored answers.

    `strict` refuses unknown fields, and the tools and items that the prompt would otherwise omit.
    """

    style = OPENAI

    def __init__(self, *, strict: bool = False) -> None:
        self.store = ResponseStore()
        self.items = OutputItems()
        self._strict = strict

    def parse(self, body: bytes, key: str) -> ResponsesRequest | Problem:
        """Parse a body, or return a 400 problem; see `router.dialects.shared.interface.Dialect`."""
        parsed = RESPONSES.read(body, strict=self._strict)
        return (
            parsed
            if isinstance(parsed, Problem)
            else self._build_request(parsed.body, parsed.fields, parsed.ignored, key)
        )

    def get(self, key: str, name: str) -> bytes | Problem:
        """Return a stored answer of an API key as JSON, or a 404 problem. `name` is the id of the answer."""
        stored = self.store.get(key, name)
        return _build_unknown(name) if stored is None else stored.body

    def delete(self, key: str, name: str) -> bytes | Problem:
        """Delete a stored answer of an API key and its items. Return the confirmation as JSON, or a 404 problem."""
        self.items.drop(key, name)
        if not self.store.drop(key, name):
            return _build_unknown(name)
        return msgspec.json.encode({"id": name, "object": "response", "deleted": True})

    def _build_request(
        self, body: ResponsesBody, fields: Body, ignored: tuple[str, ...], key: str
    ) -> ResponsesRequest | Problem:
        tools = _collect_tools(body, strict=self._strict)
        if isinstance(tools, Problem):
            return tools
        omitted = [*list_omitted_items(body.input), *list_omitted_parts(body.input)]
        if omitted and self._strict:
            return build_omitted_problem(omitted[0])
        conversation = self._build_conversation(body, key, tools)
        if isinstance(conversation, Problem):
            return conversation
        effort = body.reasoning.effort if body.reasoning is not None else None
        template = encode_variables(None, **get_reasoning_variables(effort))
        if isinstance(template, Problem):
            return template
        grammar = _build_grammar(body, tools)
        if isinstance(grammar, Problem):
            return grammar
        params = GenerationParams(
            grammar=grammar,
            max_tokens=resolve_limit(body.max_output_tokens),
            temperature=body.temperature,
            top_p=body.top_p,
            one_call=body.parallel_tool_calls is False,
        )
        messages = (Message("system", body.instructions), *conversation) if body.instructions else conversation
        return ResponsesRequest(
            compute_demand(body.model, messages, params, tools.text),
            messages,
            params,
            bool(body.stream),
            True,
            tools.text,
            frozenset(),
            template,
            body.prompt_cache_key or body.session_id or body.chat_id or body.user or "",
            sanitize_names([*ignored, *(f"include={name}" for name in body.include or ()), *tools.left_out, *omitted]),
            ResponseMeta(secrets.token_hex(16), body, fields, tools.origins),
            conversation,
            self.store if body.store is not False else None,
            self.items if body.store is not False else None,
            key,
        )

    def _build_conversation(self, body: ResponsesBody, key: str, tools: ToolSet) -> tuple[Message, ...] | Problem:
        """Return the conversation, which is the stored messages followed by the new messages; or a 400 problem."""
        items = body.input if isinstance(body.input, str) else self._resolve_references(body.input, key)
        if isinstance(items, Problem):
            return items
        messages = convert_items(items, tools.origins)
        if isinstance(messages, Problem):
            return messages
        if not messages:
            return build_invalid("input has no message: add one", "input")
        before = body.previous_response_id
        if before is None:
            return tuple(messages)
        stored = self.store.get(key, before)
        if stored is None:
            text = f"no answer {before[:64]!r} is stored for this key: send the whole conversation in input"
            return build_invalid(text, "previous_response_id", "previous_response_not_found")
        return (*stored.messages, *messages)

    def _resolve_references(self, items: Sequence[InputItem], key: str) -> list[Item] | Problem:
        """Return the items of a body, with references replaced by the stored items of the key.

        Return a 400 problem for a reference to an item that is not stored, and for a second reference to the same item.
        """
        found = self.items.find(key, [item.id for item in items if isinstance(item, ItemReference)])
        resolved: list[Item] = []
        for at, item in enumerate(items):
            if isinstance(item, ItemReference):
                stored = found.pop(item.id, None)
                if stored is None:
                    text = f"no item {item.id[:64]!r} is stored for this key, or input has it twice"
                    return build_invalid(f"{text}: send the items themselves, and store: false", f"input[{at}].id")
                resolved.append(_STORED[stored["type"]].model_validate(stored))
            else:
                resolved.append(item)
        return resolved


_STORED: Mapping[str, type[MessageItem | CallItem | CustomCallItem | ReasoningItem]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "custom_tool_call": CustomCallItem,
    "reasoning": ReasoningItem,
}
"""Class of the input item for each type of output item."""


def _build_grammar(body: ResponsesBody, tools: ToolSet) -> GrammarSpec | Problem | None:
    """Return the grammar of the answer, from its format and its forced calls; None if the answer is free."""
    spec = body.text.format if body.text is not None else None
    form: GrammarSpec | Problem | None = GrammarSpec(GrammarKind.JSON_OBJECT) if isinstance(spec, JsonObject) else None
    if isinstance(spec, SchemaFormat):
        form = convert_schema(spec.schema_, "text.format.schema")
    if isinstance(form, Problem):
        return form
    rule = convert_tool_choice(body.tool_choice)
    return add_call_constraints(form, tools.names, word=rule.word, named=rule.named, strict=tools.strict)


def _collect_tools(body: ResponsesBody, *, strict: bool) -> ToolSet | Problem:
    items = () if isinstance(body.input, str) else body.input
    tools = [*(body.tools or ()), *(tool for item in items if isinstance(item, ToolsItem) for tool in item.tools)]
    offered = (offer for tool in tools for offer in _convert_tool(tool))
    rule = convert_tool_choice(body.tool_choice)
    return collect_tools(offered, tools, strict=strict, include_text=rule.word != "none", allowed=rule.allowed)


def _convert_tool(
    tool: FunctionTool | ResponsesCustomTool | Namespace | ForeignPart, namespace: str = ""
) -> Iterator[OfferedTool]:
    """Yield the functions of a tool for the model.

    A namespace has those of its tools. A tool that runs on a server has none.
    """
    if isinstance(tool, Namespace):
        for inner in tool.tools:
            yield from _convert_tool(inner, tool.name)
    elif isinstance(tool, ResponsesCustomTool):
        body = build_custom_function(tool.name, tool.description, tool.format)
        yield OfferedTool(body, origin=ClientTool(tool.name, custom=True, namespace=namespace))
    elif isinstance(tool, FunctionTool):
        body = build_function(tool.name, tool.description, tool.parameters, strict=tool.strict)
        yield OfferedTool(body, bool(tool.strict), ClientTool(tool.name, namespace=namespace) if namespace else None)


def build_unsupported_use(name: str, query: bytes) -> Problem | None:
    """Return the problem of an unsupported use of a path below `/v1/responses/`; None for any other use.

    An unsupported route gives a 404 problem, and the retrieval of a stored answer as a stream gives a 400 problem.
    `name` is the path after `/v1/responses/`, and `query` is the query of the URL.
    """
    hint = _UNSUPPORTED.get(name.rpartition("/")[2])
    if hint is not None:
        return Problem(404, "not_found", f"/v1/responses/{name[:64]} is not supported: {hint}")
    if parse_qs(query).get(b"stream", [b""])[-1] in (b"true", b"1"):
        return build_invalid("a stored answer cannot be streamed: retrieve it without stream", "stream")
    return None


def _build_unknown(name: str) -> Problem:
    return Problem(404, "not_found", f"no answer {name[:64]!r} is stored for this key")
