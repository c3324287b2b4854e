"""Conversion of Anthropic's messages to the messages of a Generate frame.

Anthropic's turn is a list of blocks. A frame's message has one text, one reasoning and its calls, and each tool result
is a separate message. Neighbours of one role are merged, as Anthropic documents, because many templates accept only
alternating roles. System texts at the beginning, in `system` or in messages, become one message. Later system texts
keep their position.
"""

from collections.abc import Iterable, Sequence
from itertools import chain, groupby

from msgspec.structs import replace

from router.admission.request_limits import MAX_CALLS
from router.dialects.anthropic.schema import (
    AnthropicMessage,
    Block,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from router.dialects.shared.common_fields import ForeignPart
from router.dialects.shared.strict_json import encode_json
from router.dialects.shared.tools import render_omitted_part
from router.errors import Problem, build_invalid
from wire.frames import Message, ToolCall

MAX_INPUT_BYTES = 1024 * 1024
"""Maximum size of the `input` of one tool call, in bytes of its JSON."""
ATTRIBUTION = "x-anthropic-billing-header:"
"""Beginning of a line with which Claude Code begins its system prompt. The line is for Anthropic's billing, and has a
checksum of the request. No later request would find its beginning in the prefix cache."""
_JOINT = {"system": "\n\n", "user": "\n", "assistant": ""}


def convert_messages(
    system: str | list[TextBlock] | None, body_messages: Iterable[AnthropicMessage]
) -> list[Message] | Problem:
    """Return Anthropic's messages as messages of a frame, or a 400 problem with the path of the wrong block.

    The system prompt `system`, if there is one, comes first, without attribution lines (`ATTRIBUTION`). Neighbours of
    one role are merged, except tool results.
    """
    messages: list[Message] = []
    prompt = _join_system(system)
    if prompt:
        messages.append(Message("system", prompt))
    for at, message in enumerate(body_messages):
        for part in _convert_blocks(message, f"messages[{at}]"):
            if isinstance(part, Problem):
                return part
            messages.append(part)
    return [_merge_run(role, list(run)) for role, run in _group_runs(messages)]


def _join_system(system: str | list[TextBlock] | None) -> str:
    """Return the text of a system prompt without attribution lines at the beginning of its blocks."""
    texts = [system] if isinstance(system, str) else [block.text for block in system or ()]
    kept = [text if not text.startswith(ATTRIBUTION) else text.partition("\n")[2].lstrip("\n") for text in texts]
    return _JOINT["system"].join(new for text, new in zip(texts, kept, strict=True) if new or not text)


def join_texts(content: str | Sequence[TextBlock | ForeignPart] | None, joint: str = "\n") -> str:
    """Return the text of a content, joined by `joint`; empty without content."""
    if content is None or isinstance(content, str):
        return content or ""
    return joint.join(block.text if isinstance(block, TextBlock) else render_omitted_part(block) for block in content)


def list_omitted_parts(body_messages: Iterable[AnthropicMessage]) -> list[str]:
    """Return the parts of results that are no text, as `path=type`."""
    return [
        f"messages[].content[].content[].type={part.type}"
        for message in body_messages
        for block in message.content
        if isinstance(block, ToolResultBlock)
        for part in block.content or ()
        if isinstance(part, ForeignPart)
    ]


def _group_runs(messages: list[Message]) -> Iterable[tuple[str, Iterable[Message]]]:
    """Group neighbours of one role; each tool result is a group of its own."""
    for role, run in groupby(messages, key=lambda message: message.role):
        if role == "tool":
            yield from ((role, (message,)) for message in run)
        else:
            yield role, run


def _merge_run(role: str, run: list[Message]) -> Message:
    """Join the messages of one role in linear time."""
    if len(run) == 1:
        return run[0]
    return replace(
        run[0],
        content=_JOINT[role].join(message.content for message in run if message.content),
        tool_calls=tuple(chain.from_iterable(message.tool_calls for message in run)),
        reasoning="\n".join(message.reasoning for message in run if message.reasoning),
    )


def _convert_blocks(message: AnthropicMessage, path: str) -> Iterable[Message | Problem]:
    """Yield a message's blocks, each as a message."""
    if isinstance(message.content, str):
        yield Message(message.role, message.content)
        return
    if sum(isinstance(block, ToolUseBlock) for block in message.content) > MAX_CALLS:
        yield build_invalid(f"a message has at most {MAX_CALLS} tool_use blocks", f"{path}.content")
        return
    if not message.content:
        yield Message(message.role)
    for at, block in enumerate(message.content):
        only = _get_required_role(block)
        if only and only != message.role:
            yield build_invalid(
                f"only messages with the role {only} can have {block.type}", f"{path}.content[{at}].type"
            )
            return
        yield _convert_block(message.role, block, f"{path}.content[{at}]")


def _get_required_role(block: Block) -> str:
    if isinstance(block, TextBlock):
        return ""
    return "user" if isinstance(block, ToolResultBlock) else "assistant"


def _convert_block(role: str, block: Block, path: str) -> Message | Problem:
    if isinstance(block, TextBlock):
        return Message(role, block.text)
    if isinstance(block, ToolResultBlock):
        return Message("tool", join_texts(block.content), tool_call_id=block.tool_use_id)
    if isinstance(block, ThinkingBlock):
        return Message(role, reasoning=block.thinking)
    if isinstance(block, ToolUseBlock):
        text = encode_json(block.input, f"{path}.input", MAX_INPUT_BYTES)
        return text if isinstance(text, Problem) else Message(role, tool_calls=(ToolCall(block.id, block.name, text),))
    return Message(role)
