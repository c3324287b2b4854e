"""Harmony, the format of the answers of gpt-oss, which mlx-lm does not support.

An answer is a sequence of messages. Each message has a header with a channel, and a call has a recipient:

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>

    header ──analysis──► reasoning ──<|end|>──► header
    header ──final, commentary, another channel──► normal ──<|end|>──► header
    header ──to=functions.──► tool ──<|call|>, <|end|>──► header

The prompt ends within the header of the first message. The model puts the recipient before or after the channel, and on
the channel `analysis` as well. Text on `commentary` without a recipient is for the user, and precedes a call.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Final, cast

from node.engine.text.markers import NORMAL, REASONING, TOOL, MarkerPlace, MarkerSet

HEADER: Final = "header"
"""State within the header of a message. Its text is sent only if the answer has no marker."""
START: Final = "<|start|>"
CHANNEL: Final = "<|channel|>"
MESSAGE: Final = "<|message|>"
END: Final = "<|end|>"
ENDS: Final = ("<|call|>", "<|return|>")
"""Tokens that end an answer."""
TOKENS: Final = (START, CHANNEL, MESSAGE, END, *ENDS)
"""Special tokens of the format. A model whose vocabulary has all of them uses this format."""
CONSTRAIN: Final = "<|constrain|>"
"""Special token before the type of a call's arguments."""
OPENING: Final = f"{START}assistant"
"""End of a prompt whose answer consists of whole messages. Any other prompt ends within a message, which the answer
continues."""
ANALYSIS: Final = f"{CHANNEL}analysis{MESSAGE}"
"""Header of a message on the channel of reasoning."""
RECIPIENT: Final = " to=functions."
"""Text before the name of the called function."""
MARKERS: Final = MarkerSet(
    call=(RECIPIENT, ""),
    edges={
        HEADER: [(ANALYSIS, REASONING), (RECIPIENT, TOOL), (MESSAGE, NORMAL)],
        REASONING: [(END, HEADER)],
        NORMAL: [(END, HEADER)],
        TOOL: [("<|call|>", HEADER), (END, HEADER)],
    },
    initial=HEADER,
)
"""Markers of the format. The end of an answer also ends a call, because the token `<|call|>` ends the answer."""
CONTINUED: Final = MarkerPlace(NORMAL, MESSAGE)
"""State within the text of a message that the prompt has begun."""
CONSTRAINED_MARKERS: Final = replace(
    MARKERS, edges={state: found if state in (HEADER, REASONING) else [] for state, found in MARKERS.edges.items()}
)
"""Markers of an answer under a grammar. Its last message ends only with the answer, because a marker within JSON is
text."""
_NAME = re.compile(r"[\w.-]+")


def has_format(vocabulary: Mapping[str, int]) -> bool:
    """Return whether a vocabulary (ids by token) has all special tokens of the Harmony format (`TOKENS`)."""
    return all(token in vocabulary for token in TOKENS)


def parse_call(block: str, tools: list[object]) -> dict[str, object]:
    """Parse the rest of a message after `RECIPIENT`: the name of the function, the rest of the header, and the
    arguments. Return the call, with `name` and `arguments`. Raise `ValueError` if the block is not a call. `tools` has
    no effect."""
    header, marker, arguments = block.strip().partition(MESSAGE)
    name = _NAME.match(header)
    if name is None or not marker or "{" in header:
        raise ValueError("a call has a name, a header and arguments")
    return {"name": name[0], "arguments": cast("object", json.loads(arguments.strip() or "{}"))}
