"""`/v1/chat/completions`: a body in OpenAI's shape into the parts of a Generate frame.

pydantic lives at this edge only (`chat_body`). Whatever is accepted has an effect; everything else is a 400 that names
the parameter.
"""

from typing import Any, cast

from pydantic import ValidationError

from router.dialects import chat_quick
from router.dialects.chat_answer import ChatChunks, completion
from router.dialects.chat_body import HARMLESS, NEUTRAL, ChatBody
from router.dialects.chat_messages import messages_of
from router.dialects.chat_problems import from_validation, unsupported
from router.dialects.demand import demand_of
from router.dialects.dialect import OPENAI, Reader
from router.dialects.limits import TOOLS_BYTES, VARIABLES_BYTES
from router.dialects.request import Request
from router.dialects.strict_json import Body, read_object, write
from router.problems import Problem, invalid
from router.ticket import Answer, Job
from wire.frames import Finished, Params

NO_PARAMETERS: Body = {"type": "object", "properties": {}}
"""What a function without parameters takes; templates look for them."""
RESERVED = frozenset({
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "max_length", "messages",
    "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize", "tokenizer_kwargs", "tools",
    "truncation",
})  # fmt: skip
"""What whoever renders a template decides, and no client: a template of its own could run for ever."""


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
    found = read_object(body)
    if isinstance(found, Problem):
        return found
    asked = _strip(found)
    if isinstance(asked, Problem):
        return asked
    try:
        return _request(ChatBody.model_validate(asked), asked)
    except ValidationError as error:
        return from_validation(error)


def _strip(found: Body) -> Body | Problem:
    """Take out what changes nothing; refuse what is not offered."""
    asked: Body = {}
    for name, value in found.items():
        if name in NEUTRAL:
            if not _neutral(value, NEUTRAL[name]):
                return unsupported(name)
        elif name not in HARMLESS:
            asked[name] = value
    return asked


def _neutral(value: object, allowed: tuple[object, ...]) -> bool:
    return any(type(value) is type(one) and value == one for one in allowed)


def _request(body: ChatBody, asked: Body) -> ChatRequest | Problem:
    """Put the parts together; `asked` is the body as it was written."""
    messages = messages_of(body.messages)
    if isinstance(messages, Problem):
        return messages
    tools = _tools(body, asked)
    if isinstance(tools, Problem):
        return tools
    template = _template(body)
    if isinstance(template, Problem):
        return template
    options = body.stream_options
    if options is not None and not body.stream:
        return invalid("stream_options is only possible with stream: true", "stream_options")
    if body.top_logprobs and not body.logprobs:
        return invalid("top_logprobs is only possible with logprobs: true", "top_logprobs")
    params = _params(body)
    return ChatRequest(
        demand_of(body.model, messages, params, tools),
        messages,
        params,
        bool(body.stream),
        options is not None and bool(options.include_usage),
        tools,
        template,
    )


def _params(body: ChatBody) -> Params:
    stop = body.stop
    top_k = body.top_k
    return Params(
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        seed=body.seed,
        stop=() if stop is None else (stop,) if isinstance(stop, str) else tuple(stop),
        n=body.n or 1,
        top_k=None if top_k is None else max(0, top_k),
        min_p=body.min_p,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=tuple((int(token), bias) for token, bias in (body.logit_bias or {}).items() if bias),
        logprobs=bool(body.logprobs),
        top_logprobs=body.top_logprobs or 0,
    )


def _tools(body: ChatBody, asked: Body) -> str | Problem:
    """Write the tools as they came, empty when there are none or none may be called. The keys keep the client's order:
    templates print them."""
    if not body.tools:
        return ""
    text = write([_tool(tool) for tool in cast("list[Body]", asked["tools"])], "tools", TOOLS_BYTES)
    return "" if isinstance(text, str) and body.tool_choice == "none" else text


def _tool(tool: Body) -> Body:
    function = {name: value for name, value in tool["function"].items() if value is not None}
    return tool | {"function": {**function, "parameters": function.get("parameters", NO_PARAMETERS)}}


def _template(body: ChatBody) -> str | Problem:
    """Write the template's variables; what is given by name goes before what `reasoning_effort` means."""
    variables: dict[str, Any] = {}
    given = body.chat_template_kwargs or {}
    mine = sorted(RESERVED & given.keys())
    if mine:
        return invalid(f"{mine[0]} is not for the client to set", f"chat_template_kwargs.{mine[0]}")
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    if body.reasoning_effort == "none":
        variables["enable_thinking"] = False
    variables |= given
    return write(variables, "chat_template_kwargs", VARIABLES_BYTES) if variables else ""
