"""Harmony, the format of the answers of gpt-oss. mlx-lm does not know it.

An answer is a sequence of messages. Each has a header with a channel, and a call has a recipient:

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>

    header ──analysis──► reasoning ──<|end|>──► header
    header ──final, commentary, another channel──► normal ──<|end|>──► header
    header ──to=functions.──► tool ──<|call|>, <|end|>──► header

The prompt ends within the header of the first message. The model puts the recipient before or after the channel, and on
the channel `analysis` as well. Text on `commentary` without a recipient is for the user: it precedes a call.
"""

import json
import re
from collections.abc import Mapping
from typing import Final, cast

from node.engine.text.markers import NORMAL, REASONING, TOOL, MarkerSet

HEADER: Final = "header"
"""State within the header of a message, whose text is not sent."""
TOKENS: Final = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
"""Special tokens of the format. A vocabulary with all of them is that of a model with this format."""
ENDS: Final = ("<|call|>", "<|return|>")
"""Tokens that end an answer."""
ANALYSIS: Final = "<|channel|>analysis<|message|>"
"""Header of a message on the channel of reasoning."""
RECIPIENT: Final = " to=functions."
"""Text before the name of the called function."""
MARKERS: Final = MarkerSet(
    call=(RECIPIENT, ""),
    edges={
        HEADER: [(ANALYSIS, REASONING), (RECIPIENT, TOOL), ("<|message|>", NORMAL)],
        REASONING: [("<|end|>", HEADER)],
        NORMAL: [("<|end|>", HEADER)],
        TOOL: [("<|call|>", HEADER), ("<|end|>", HEADER)],
    },
    initial=HEADER,
)
"""Markers of the format. A call also ends with the answer, because `<|call|>` ends it."""
_CALL = re.compile(r"([\w.-]+)[^{]*?<\|message\|>(.*)", re.DOTALL)


def has_format(vocabulary: Mapping[str, int]) -> bool:
    """Return whether the answers of a model with this vocabulary have the format."""
    return all(token in vocabulary for token in TOKENS)


def parse_call(block: str, tools: list[object]) -> dict[str, object]:
    """Parse the rest of a message after `RECIPIENT`: the name of the function, the rest of the header, and the
    arguments. Return the call. Raise `ValueError` if the block is no call; `tools` has no effect."""
    found = _CALL.fullmatch(block.strip())
    if found is None:
        raise ValueError("a call has a name, a header and arguments")
    return {"name": found[1], "arguments": cast("object", json.loads(found[2].strip() or "{}"))}
