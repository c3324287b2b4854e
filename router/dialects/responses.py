"""`/v1/responses`: items into the parts of a Generate frame, after those of a kept answer if one is named."""

import secrets
from typing import cast

import msgspec

from router.dialects.demand import demand_of
from router.dialects.dialect import OPENAI, Reader
from router.dialects.formats import JsonObject, of_schema, with_calls
from router.dialects.request import Request
from router.dialects.responses_answer import Outline, ResponseChunks, response
from router.dialects.responses_body import RESPONSES, ChosenTool, FunctionTool, ResponsesBody, SchemaFormat
from router.dialects.responses_input import messages_of
from router.dialects.responses_kept import Kept, entry
from router.dialects.spoken import Spoken
from router.dialects.strict_json import Body
from router.dialects.template import thinking, variables
from router.dialects.tools import function, written
from router.problems import Problem, invalid
from router.ticket import Answer, Job
from wire.frames import Finished, Grammar, Message, Params, ToolCall


class ResponsesRequest(Request, frozen=True):
    """A body that was understood. `said` is the conversation without its instructions; `kept` is None where the answer
    is not to be kept."""

    outline: Outline | None = None
    said: tuple[Message, ...] = ()
    kept: Kept | None = None
    owner: str = ""

    def whole(self, job: Job, answer: Answer, finished: Finished) -> bytes:
        """See `router.dialects.dialect.Asked`."""
        body, said = response(cast("Outline", self.outline), job, answer, finished)
        self._keep(body, said)
        return body

    def chunks(self, reader: Reader) -> ResponseChunks:
        """See `router.dialects.dialect.Asked`."""
        return ResponseChunks(cast("Outline", self.outline), reader.job, self._keep)

    def _keep(self, body: bytes, said: Spoken) -> None:
        if self.kept is None or self.outline is None:
            return
        calls = tuple(ToolCall(call.id, call.name, call.arguments) for call in said.calls)
        last = Message("assistant", said.content, tool_calls=calls, reasoning=said.reasoning)
        self.kept.put(self.owner, f"resp_{self.outline.name}", entry(body, (*self.said, last)))


class Responses:
    """The routes, and what is kept for them."""

    style = OPENAI

    def __init__(self) -> None:
        self.kept = Kept()

    def parse(self, body: bytes, key: str) -> ResponsesRequest | Problem:
        """See `router.dialects.dialect.Dialect`."""
        found = RESPONSES.read(body)
        return found if isinstance(found, Problem) else self._request(*found, key)

    def get(self, key: str, name: str) -> bytes | Problem:
        """Give an answer that was kept for this key."""
        kept = self.kept.get(key, name)
        return _unknown(name) if kept is None else kept.body

    def delete(self, key: str, name: str) -> bytes | Problem:
        """Forget an answer that was kept for this key."""
        if not self.kept.drop(key, name):
            return _unknown(name)
        return msgspec.json.encode({"id": name, "object": "response", "deleted": True})

    def _request(self, body: ResponsesBody, asked: Body, key: str) -> ResponsesRequest | Problem:
        said = self._said(body, key)
        if isinstance(said, Problem):
            return said
        tools = written(map(_tool, body.tools), told=body.tool_choice != "none") if body.tools else ""
        if isinstance(tools, Problem):
            return tools
        effort = body.reasoning.effort if body.reasoning is not None else None
        template = variables(None, **thinking(effort))
        if isinstance(template, Problem):
            return template
        grammar = _grammar(body)
        if isinstance(grammar, Problem):
            return grammar
        params = Params(
            grammar=grammar,
            max_tokens=body.max_output_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            one_call=body.parallel_tool_calls is False,
        )
        messages = (Message("system", body.instructions), *said) if body.instructions else said
        demand = demand_of(body.model, messages, params, tools)
        kept = self.kept if body.store is not False else None
        outline = Outline(secrets.token_hex(16), body, asked)
        session = body.prompt_cache_key or body.user or ""
        return ResponsesRequest(demand, messages, params, bool(body.stream), True, tools, template, session, outline,
                                said, kept, key)  # fmt: skip

    def _said(self, body: ResponsesBody, key: str) -> tuple[Message, ...] | Problem:
        """Give the conversation: what went before, and what is new."""
        messages = messages_of(body.input)
        before = body.previous_response_id
        if isinstance(messages, Problem) or before is None:
            return messages if isinstance(messages, Problem) else tuple(messages)
        kept = self.kept.get(key, before)
        if kept is None:
            text = f"no answer {before[:64]!r} is kept for this key: send the whole conversation in input"
            return invalid(text, "previous_response_id", "previous_response_not_found")
        return (*kept.messages, *messages)


def _grammar(body: ResponsesBody) -> Grammar | Problem | None:
    """Give what the answer has to be like: its format, and the calls that are asked for."""
    asked = body.text.format if body.text is not None else None
    form: Grammar | Problem | None = Grammar("json_object") if isinstance(asked, JsonObject) else None
    if isinstance(asked, SchemaFormat):
        form = of_schema(asked.schema_, "text.format.schema")
    if isinstance(form, Problem):
        return form
    choice, tools = body.tool_choice, body.tools or ()
    named = choice.name if isinstance(choice, ChosenTool) else ""
    word = choice if isinstance(choice, str) else "required" if named else "auto"
    strict = any(tool.strict for tool in tools)
    return with_calls(form, (tool.name for tool in tools), word=word, named=named, strict=strict)


def _tool(tool: FunctionTool) -> Body:
    return function(tool.name, tool.description, tool.parameters, strict=tool.strict)


def _unknown(name: str) -> Problem:
    return Problem(404, "not_found", f"no answer {name[:64]!r} is kept for this key")
