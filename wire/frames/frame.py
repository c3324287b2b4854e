"""Base of all frames, and the format of frames.

A frame is `u32 length | u8 tag | msgpack array` (`wire.codec`). The link and the socket of the engine have the same
tags, because the agent forwards frames about requests between the two. Of such a frame the agent needs only the first
field, `request`. Fields are only appended; a field that was not in protocol 1 has a default. `wire.frames.registry`
has the tags.

Sizes are bytes, times are seconds. `request` is the coordinator's number of an attempt of a request, or of a command.
The number is unique across restarts, because its bits above the lowest 40 are the epoch. `seq` grows with every
Generate and Embed. A report acknowledges the highest `seq` that the engine has admitted, queued or refused.
"""

from wire.bounds import (
    Number,
)
from wire.report import (
    WireStruct,
)


class Frame(WireStruct, frozen=True, array_like=True, gc=False):
    """Base of all frames: a message between coordinator, agent and engine."""


class RequestHead(WireStruct, frozen=True, array_like=True, gc=False):
    """First field of every frame about a request. Agents that forward a frame decode only this field."""

    request: Number
