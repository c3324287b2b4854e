"""Chat template of a model: from the messages of a request to the text of its prompt.

Templates come with the models and run in transformers' sandbox. They get the time of the request instead of the current
time, because a resumed request must get the same prompt. An exception in a template fails only the request. A template
may run on several threads at the same time.
"""

import importlib
import json
import re
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import partial
from hashlib import blake2b
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final, cast

from mlx_lm.tokenizer_utils import TokenizerWrapper
from msgspec.structs import replace

from node.engine.text.harmony import ANALYSIS
from node.engine.text.time_limit import Deadline, DeadlineError
from node.engine.text.tokenizer_errors import TemplateFailed
from wire.frames import Generate, Message

if TYPE_CHECKING:
    from jinja2 import Template

RESERVED: Final = frozenset(
    {
        "messages",
        "conversation",
        "tools",
        "add_generation_prompt",
        "tokenize",
        "chat_template",
        "strftime_now",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "sanitize_control_tokens",
    }
)
"""Forbidden names of a request's template variables, which would change arguments of the call of the template."""
DEVELOPER: Final = "developer"
"""Role of OpenAI's API for instructions of an application. It replaces `system`."""
_INSTRUCTIONS = frozenset({"system", DEVELOPER})
SHORT_ID_CHARS: Final = 9
"""Number of characters of the call ids that templates of Mistral's models accept. They raise for any other id."""
_SHORT_IDS = re.compile(rf"\blength\s*!=\s*{SHORT_ID_CHARS}\b")
RENDER_TIMEOUT_SECONDS: Final = 5.0
"""Time limit of a chat template in seconds. A conversation of 8 MB takes less than 1 s."""
_NOW: ContextVar[int] = ContextVar("_NOW")
"""Time of the request whose template is being rendered, in Unix seconds."""


class ChatTemplate:
    """Renderer of prompts with the template of one model."""

    def __init__(self, wrapper: TokenizerWrapper) -> None:
        self._wrapper = wrapper
        self._own_renderer = wrapper.chat_template is None or "chat_template_type" in wrapper.init_kwargs

    def render(self, request: Generate) -> str:
        """Return the text of a request's prompt. With the variable `continue_final_message`, the prompt ends within the
        last message, which the answer continues; otherwise it ends with the start of an answer. If the template raises,
        or leaves out instructions, it is called again with the messages of `simplify_turns`.

        Raise `TemplateFailed` if the model has no template, a variable is in `RESERVED`, the tools are not an array, or
        the variables not an object. Raise `ValueError` for tools or variables that are not JSON, and `DeadlineError`
        after `RENDER_TIMEOUT_SECONDS`. Exceptions of the template propagate.
        """
        if not self._wrapper.has_chat_template:
            raise TemplateFailed("the model has no chat template")
        variables = _parse_variables(request.template)
        continued = variables.pop("continue_final_message", False) is True
        if continued:
            variables["continue_final_message"] = True
        tools = parse_tools(request.tools) or None
        source = "" if self._own_renderer else self._wrapper.get_chat_template(None, tools)
        if not self._own_renderer:
            _set_clock(source)
        given = convert_developer_messages(request.messages, is_known=DEVELOPER in source)
        if ANALYSIS in source:  # this template raises for a call with both
            given = [replace(one, reasoning="") if one.tool_calls and one.content else one for one in given]
        if _SHORT_IDS.search(source):
            given = [shorten_call_ids(message) for message in given]
        apply = partial(self._apply_template, tools=tools, continued=continued, variables=variables)
        simplified = simplify_turns(given)
        moment = _NOW.set(request.created)
        try:
            text = apply(given)
            if simplified == list(given) or has_instructions(text, given):
                return text
            return apply(simplified)
        except DeadlineError:
            raise
        except Exception:
            if simplified == list(given):
                raise
            return apply(simplified)
        finally:
            _NOW.reset(moment)

    def _apply_template(
        self, given: Sequence[Message], tools: list[object] | None, continued: bool, variables: dict[str, object]
    ) -> str:
        with Deadline(RENDER_TIMEOUT_SECONDS, f"the chat template took more than {RENDER_TIMEOUT_SECONDS:.0f} s"):
            messages = [_to_template_message(message, self._own_renderer) for message in given]
            return cast(
                "str",
                cast("Any", self._wrapper).apply_chat_template(
                    messages, tools=tools, add_generation_prompt=not continued, tokenize=False, **variables
                ),
            )


def convert_developer_messages(messages: Sequence[Message], *, is_known: bool) -> Sequence[Message]:
    """Return messages in which system messages replace messages with the role `developer`, unless the template supports
    that role (`is_known`).

    The replacement is necessary because most templates leave out messages of an unknown role, or raise. Such messages
    at the start are also joined with adjacent system messages, because many templates accept only one message there.
    """
    if all(message.role != DEVELOPER for message in messages):
        return messages
    opening = takewhile(lambda message: message.role in _INSTRUCTIONS, messages)
    found = join_opening(messages) if any(message.role == DEVELOPER for message in opening) else messages
    if is_known:
        return found
    return [replace(message, role="system") if message.role == DEVELOPER else message for message in found]


def join_opening(messages: Sequence[Message]) -> Sequence[Message]:
    """Join the system and developer messages at the start of `messages` into one message with the role of the first.
    Return all messages."""
    opening = list(takewhile(lambda message: message.role in _INSTRUCTIONS, messages))
    if len(opening) < 2:
        return messages
    text = "\n\n".join(message.content for message in opening)
    return [replace(opening[0], content=text), *messages[len(opening) :]]


def has_instructions(text: str, messages: Sequence[Message]) -> bool:
    """Return whether the prompt `text` contains the text of all system and developer messages."""
    return all(message.content.strip() in text for message in messages if message.role in _INSTRUCTIONS)


def simplify_turns(messages: Sequence[Message]) -> list[Message]:
    """Return messages for templates that accept only one system message, at the start, and no two user messages in a
    row.

    System messages at the start are joined. Later system messages become user messages. User messages in a row are
    joined.
    """
    found = list[Message]()
    for message in join_opening(messages):
        turn = replace(message, role="user") if found and message.role in _INSTRUCTIONS else message
        if found and turn.role == "user" and found[-1].role == "user":
            found[-1] = replace(found[-1], content=f"{found[-1].content}\n\n{turn.content}")
        else:
            found.append(turn)
    return found


def shorten_call_ids(message: Message) -> Message:
    """Return a message whose call ids are replaced by ids of `SHORT_ID_CHARS` letters and digits. Equal ids stay
    equal."""
    calls = tuple(replace(call, id=_shorten_id(call.id)) for call in message.tool_calls)
    result_of = _shorten_id(message.tool_call_id) if message.tool_call_id else ""
    return replace(message, tool_calls=calls, tool_call_id=result_of)


def _shorten_id(name: str) -> str:
    if len(name) == SHORT_ID_CHARS and name.isascii() and name.isalnum():
        return name
    return blake2b(name.encode(), digest_size=SHORT_ID_CHARS).hexdigest()[:SHORT_ID_CHARS]


def _format_now(form: str) -> str:
    return datetime.fromtimestamp(_NOW.get(), UTC).strftime(form)


def _set_clock(source: str) -> None:
    """Make the template with this source use the time of the request.

    A template variable cannot pass this clock, because transformers converts every value to plain data first. The clock
    therefore replaces the original clock in the globals of the compiled template, which transformers caches by source.
    """
    module = importlib.import_module("transformers.utils.chat_template_utils")
    compiled = cast("Callable[[str], Template]", module._compile_jinja_template)
    compiled(source).globals["strftime_now"] = _format_now


def _to_template_message(message: Message, own_renderer: bool) -> dict[str, object]:
    """Return a message in the form of templates. Arguments are objects, because most templates iterate over them;
    renderers in Python parse the text themselves.

    Empty arguments, which clients send for functions without parameters, are an empty object.
    """
    fields: dict[str, object] = {"role": message.role, "content": message.content}
    if message.name:
        fields["name"] = message.name
    if message.tool_call_id:
        fields["tool_call_id"] = message.tool_call_id
    if message.reasoning:
        fields["reasoning_content"] = message.reasoning
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": (call.arguments or "{}") if own_renderer else _parse_arguments(call.arguments or "{}"),
                },
            }
            for call in message.tool_calls
        ]
    return fields


def _parse_arguments(text: str) -> object:
    try:
        found = json.loads(text)
    except ValueError:
        return text
    return cast("object", found) if isinstance(found, dict) else text


def parse_tools(text: str) -> list[object]:
    """Parse the tools of a request, a JSON array. Return an empty list for an empty text.

    Raise `TemplateFailed` if the JSON is not an array, and `ValueError` if the text is not JSON.
    """
    found = cast("object", json.loads(text or "[]"))
    if not isinstance(found, list):
        raise TemplateFailed("the tools are not a JSON array")
    return cast("list[object]", found)


def _parse_variables(text: str) -> dict[str, object]:
    found = cast("object", json.loads(text or "{}"))
    if not isinstance(found, dict):
        raise TemplateFailed("the template's variables are not a JSON object")
    variables = cast("dict[str, object]", found)
    reserved = sorted(RESERVED & variables.keys())
    if reserved:
        raise TemplateFailed(f"a template variable cannot be called {', '.join(reserved)}")
    return variables
