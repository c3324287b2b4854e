"""`/v1/chat/completions`: a body in OpenAI's shape into the parts of a Generate frame.

pydantic lives at this edge only (`chat_body`). Whatever is accepted has an effect; everything else is a 400 that names
the parameter.
"""

from typing import cast

from router.dialects import chat_quick
from router.dialects.chat_answer import ChatChunks, completion
from router.dialects.chat_body import CHAT, ChatBody
from router.dialects.chat_messages import messages_of
from router.dialects.demand import demand_of
from router.dialects.dialect import OPENAI, Reader
from router.dialects.fields import params_of, usage_wanted
from router.dialects.formats import NamedTool, with_calls
from router.dialects.request import Request
from router.dialects.strict_json import Body
from router.dialects.template import thinking, variables
from router.dialects.tools import as_written, written
from router.problems import Problem, invalid
from router.ticket import Answer, Job
from wire.frames import Finished, Grammar


class ChatRequest(Request, frozen=True, gc=False):
    """A body that was understood."""

    def whole(self, job: Job, answer: Answer, finished: Finished) -> bytes:
        """See `router.dialects.dialect.Asked`."""
        return completion(job, answer, finished)

    def chunks(self, reader: Reader) -> ChatChunks:
        """See `router.dialects.dialect.Asked`."""
        return ChatChunks(reader.job)


class Chat:
    """The route."""

    style = OPENAI

    def parse(self, body: bytes, key: str) -> ChatRequest | Problem:
        """See `router.dialects.dialect.Dialect`."""
        return parse(body)


def parse(body: bytes) -> ChatRequest | Problem:
    """Read a body (UTF-8 JSON), or say which parameter is wrong and why."""
    plain = chat_quick.read(body)
    if plain is not None:
        return ChatRequest(*plain)
    return parse_strictly(body)


def parse_strictly(body: bytes) -> ChatRequest | Problem:
    """Read any body, also one of which nothing is wrong."""
    found = CHAT.read(body)
    return found if isinstance(found, Problem) else _request(*found)


def _request(body: ChatBody, asked: Body) -> ChatRequest | Problem:
    """Put the parts together; `asked` is the body as it was written."""
    messages = messages_of(body.messages)
    if isinstance(messages, Problem):
        return messages
    tools = _tools(body, asked)
    if isinstance(tools, Problem):
        return tools
    template = variables(body.chat_template_kwargs, **thinking(body.reasoning_effort))
    if isinstance(template, Problem):
        return template
    include_usage = usage_wanted(body)
    if isinstance(include_usage, Problem):
        return include_usage
    if body.top_logprobs and not body.logprobs:
        return invalid("top_logprobs is only possible with logprobs: true", "top_logprobs")
    grammar = _grammar(body)
    if isinstance(grammar, Problem):
        return grammar
    params = params_of(
        body,
        body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=body.top_logprobs or 0 if body.logprobs else None,
        one_call=body.parallel_tool_calls is False,
        grammar=grammar,
    )
    demand = demand_of(body.model, messages, params, tools)
    return ChatRequest(demand, messages, params, bool(body.stream), include_usage, tools, template,
                       body.session)  # fmt: skip


def _grammar(body: ChatBody) -> Grammar | Problem | None:
    """Give what the answer has to be like: its format, and the calls that are asked for."""
    form = body.form()
    if isinstance(form, Problem):
        return form
    choice, tools = body.tool_choice, [tool.function for tool in body.tools or ()]
    named = choice.function.name if isinstance(choice, NamedTool) else ""
    word = choice if isinstance(choice, str) else "required" if named else "auto"
    strict = any(tool.strict for tool in tools)
    return with_calls(form, (tool.name for tool in tools), word=word, named=named, strict=strict)


def _tools(body: ChatBody, asked: Body) -> str | Problem:
    """Write the tools as they came, empty when there are none or none may be called."""
    if not body.tools:
        return ""
    return written(map(as_written, cast("list[Body]", asked["tools"])), told=body.tool_choice != "none")
