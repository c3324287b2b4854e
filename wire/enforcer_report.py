"""Part of a node's report: readings and counts of the enforcer.

The enforcer is the part of the agent that orders an engine above its limits to free memory (`node.memory.enforcer`).
"""

from typing import Annotated

from msgspec import Meta

from wire.bounds import MAX_ITEMS, Natural, Size, Text, Word
from wire.report import MemoryLevel, WireStruct


class Enforcement(WireStruct, frozen=True, array_like=True, gc=False):
    """Readings of the agent's enforcer, and counts since the start of the agent, which engine restarts do not reset."""

    level: Natural = MemoryLevel.UNKNOWN
    """`MemoryLevel` at the last poll."""
    phys: Size | None = None
    """Footprint of the engine in bytes, read by the agent; None if unreadable."""
    highest: Size | None = None
    """Highest footprint of the engine's process since its start in bytes, by the kernel; None if unknown.

    For display.
    """
    interval: Size | None = None
    """Highest footprint in bytes since the last reset of the kernel's high-water mark; None if unknown.

    For display.
    """
    cap_bound_by: Word = ""
    """Name of the term that sets the cap: `setting`, `static`, `metal` or `container`."""
    remedy: Text = ""
    """Advice for a person about the term that limits the node now; may be empty."""
    tier: Word = ""
    """Memory tier in force (setting `memory.tier`)."""
    warnings: Annotated[tuple[Text, ...], Meta(max_length=MAX_ITEMS)] = ()
    """Warnings about settings and readings that make this node less safe, as texts for a person."""
    polls: Natural = 0
    """Number of memory polls since the agent started."""
    over_caps: Natural = 0
    """Number of times that the engine rose above cap − leases, each counted once until the engine is below it."""
    kills: Natural = 0
    """Number of engine processes that the enforcer ended because they stayed above cap − leases."""
