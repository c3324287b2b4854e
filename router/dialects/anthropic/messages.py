"""Conversion of Anthropic's messages to the messages of a `Generate` frame.

A turn of Anthropic's API is a list of blocks. A message of a frame has one text, one reasoning and its calls, and each
tool result is a separate message. Adjacent messages of one role, except tool results, are merged, as Anthropic
documents, because many templates accept only alternating roles. System texts at the beginning, in `system` or in
messages, become one message. Later system texts keep their position.

Blocks of unknown types in messages of the assistant and of the system, such as a search on another server, are omitted.
Only the summary in a block `compaction` is kept. A block of the user that cannot be shown as text, such as an image, is
refused, unless its message has tool results. Claude Code sends a PDF file that a tool has read in such a message.
"""

from collections.abc import Iterable, Sequence
from itertools import chain, groupby

from msgspec.structs import replace

from router.admission.request_limits import MAX_CALLS
from router.dialects.anthropic.schema import (
    AnthropicMessage,
    Block,
    DocumentBlock,
    SearchResultBlock,
    TextBlock,
    TextSource,
    ThinkingBlock,
    ToolChangeBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from router.dialects.shared.common_fields import ForeignPart
from router.dialects.shared.strict_json import encode_json
from router.dialects.shared.tools import render_omitted_part
from router.dialects.shared.validation import UNSUPPORTED_TYPE, build_unsupported
from router.errors import Problem, build_invalid
from wire.frames import Message, ToolCall

ResultBlock = TextBlock | DocumentBlock | SearchResultBlock | ForeignPart
MAX_INPUT_BYTES = 1024 * 1024
"""Maximum size of the `input` of one tool call, in bytes of its JSON."""
ATTRIBUTION = "x-anthropic-billing-header:"
"""Prefix of a line that Claude Code puts before its system prompt. The whole line is removed.

The line is for Anthropic's billing, and has a checksum that differs in each request. With this line, no request would
find the system prompt in the prefix cache.
"""
_JOINT = {"system": "\n\n", "user": "\n", "assistant": ""}


def convert_messages(
    system: str | list[TextBlock] | None, body_messages: Iterable[AnthropicMessage]
) -> list[Message] | Problem:
    """Return Anthropic's messages as messages of a frame, or a 400 problem with the path of the wrong block.

    The system prompt `system`, if there is one, becomes the first message, without attribution lines (`ATTRIBUTION`).
    Adjacent messages of one role are merged, except tool results.
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
    """Return the text of a system prompt, without an attribution line at the beginning of each block."""
    texts = [system] if isinstance(system, str) else [block.text for block in system or ()]
    kept = [text if not text.startswith(ATTRIBUTION) else text.partition("\n")[2].lstrip("\n") for text in texts]
    return _JOINT["system"].join(new for text, new in zip(texts, kept, strict=True) if new or not text)


def join_texts(content: str | Sequence[ResultBlock] | None) -> str:
    """Return the text of a content, with a line break between its blocks; empty if there is no content."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(map(_render_block, content))


def _render_block(block: ResultBlock) -> str:
    """Return the text of a block. A block that is not text, such as an image, is replaced by a note."""
    if isinstance(block, TextBlock):
        return block.text
    if isinstance(block, SearchResultBlock):
        return "\n".join((block.title, block.source, *(part.text for part in block.content)))
    if not isinstance(block, DocumentBlock):
        name = (block.model_extra or {}).get("tool_name") if block.type == "tool_reference" else None
        return name if isinstance(name, str) and name else render_omitted_part(block.type)
    source = block.source
    if isinstance(source, TextSource):
        text = source.data
    else:
        text = render_omitted_part(block.type) if isinstance(source, ForeignPart) else join_texts(source.content)
    return "\n".join(part for part in (block.title, block.context, text) if part)


def list_omitted_parts(body_messages: Iterable[AnthropicMessage]) -> list[str]:
    """Return the blocks that the prompt omits or replaces by a note, as `path=type`, also those within tool results.

    These are blocks that are not text, such as images and PDF files, and blocks of unknown types.
    """
    return [
        f"messages[].content[].{path}type={part.type}"
        for message in body_messages
        if isinstance(message.content, list)
        for block in message.content
        for path, part in [("", block), *(("content[].", part) for part in _list_parts(block))]
        if _is_omitted(part)
    ]


def _list_parts(block: Block) -> Sequence[ResultBlock]:
    content = block.content if isinstance(block, ToolResultBlock) else None
    return content if isinstance(content, list) else ()


def _is_omitted(block: Block) -> bool:
    """Return whether a block has no text for the prompt, such as an image, a PDF file, or a block of unknown type."""
    if isinstance(block, DocumentBlock):
        return isinstance(block.source, ForeignPart)
    return isinstance(block, ForeignPart) and block.type != "tool_reference" and not _get_summary(block)


def _group_runs(messages: list[Message]) -> Iterable[tuple[str, Iterable[Message]]]:
    """Group adjacent messages of one role. Each tool result is a separate group."""
    for role, run in groupby(messages, key=lambda message: message.role):
        if role == "tool":
            yield from ((role, (message,)) for message in run)
        else:
            yield role, run


def _merge_run(role: str, run: list[Message]) -> Message:
    """Return one message for adjacent messages of one role, in linear time."""
    if len(run) == 1:
        return run[0]
    return replace(
        run[0],
        content=_JOINT[role].join(message.content for message in run if message.content),
        tool_calls=tuple(chain.from_iterable(message.tool_calls for message in run)),
        reasoning="\n".join(message.reasoning for message in run if message.reasoning),
    )


def _convert_blocks(message: AnthropicMessage, path: str) -> Iterable[Message | Problem]:
    """Yield the blocks of a message, each as a message, up to the problem of the first wrong block."""
    if isinstance(message.content, str):
        yield Message(message.role, message.content)
        return
    if sum(isinstance(block, ToolUseBlock) for block in message.content) > MAX_CALLS:
        yield build_invalid(f"a message has at most {MAX_CALLS} tool_use blocks", f"{path}.content")
        return
    if not message.content:
        yield Message(message.role)
    attached = any(isinstance(block, ToolResultBlock) for block in message.content)
    for at, block in enumerate(message.content):
        where = f"{path}.content[{at}]"
        wrong = None if attached and _is_omitted(block) else _check_block(message.role, block, where)
        if wrong is not None:
            yield wrong
            return
        if message.role != "system" or not isinstance(block, ToolChangeBlock | ForeignPart):
            yield _convert_block(message.role, block, where)


def _check_block(role: str, block: Block, path: str) -> Problem | None:
    """Return a 400 problem for a block that the role must not have, and for a block of the user that is not text.

    Return None for any other block.
    """
    only = _get_required_role(block)
    if only not in ("", role):
        return build_invalid(f"only messages with the role {only} can have {block.type}", f"{path}.type")
    if role != "user" or not _is_omitted(block):
        return None
    kind, where = (block.source.type, "source.type") if isinstance(block, DocumentBlock) else (block.type, "type")
    more = ": send the text of the document" if isinstance(block, DocumentBlock) else ""
    return build_unsupported(f"{path}.{where}", why=f"{path}.{where} {kind[:64]!r} {UNSUPPORTED_TYPE}{more}")


def _get_required_role(block: Block) -> str:
    if isinstance(block, TextBlock | ForeignPart):
        return ""
    if isinstance(block, ToolChangeBlock):
        return "system"
    return "user" if isinstance(block, ToolResultBlock | DocumentBlock | SearchResultBlock) else "assistant"


def _convert_block(role: str, block: Block, path: str) -> Message | Problem:
    if isinstance(block, TextBlock | DocumentBlock | SearchResultBlock):
        return Message(role, _render_block(block))
    if isinstance(block, ForeignPart):
        return Message(role, _get_summary(block) or (_render_block(block) if role == "user" else ""))
    if isinstance(block, ToolResultBlock):
        return Message("tool", join_texts(block.content), tool_call_id=block.tool_use_id)
    if isinstance(block, ThinkingBlock):
        return Message(role, reasoning=block.thinking)
    if isinstance(block, ToolUseBlock):
        text = encode_json(block.input, f"{path}.input", MAX_INPUT_BYTES)
        return text if isinstance(text, Problem) else Message(role, tool_calls=(ToolCall(block.id, block.name, text),))
    return Message(role)


def _get_summary(block: ForeignPart) -> str:
    """Return the summary in a block of the type `compaction`, which the prompt keeps; empty for any other block."""
    summary = (block.model_extra or {}).get("content") if block.type == "compaction" else None
    return summary if isinstance(summary, str) else ""
