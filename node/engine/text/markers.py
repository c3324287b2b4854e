"""Markers that split a model's text, and the state after each of them.

The state machine of mlx-lm splits text at markers, but drops the markers and returns only the next state. Here every
destination is a `MarkerPlace`: the state together with the marker that led to it. A block can therefore be rebuilt
exactly as generated.

    normal ──think start──► reasoning ──think end──► normal
    normal ──call start───► tool ──────call end────► normal
    reasoning ──call start► inner ─────call end────► normal      a call without the end of the reasoning
                            inner ─────think end───► normal      not a call: the reasoning only mentioned the marker
    normal ──naked start──► naked ─────naked end───► normal      and a lone call end is removed

A model's own response format adds states and edges. Text in an added state is sent only if the answer has no marker.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

NORMAL: Final = "normal"
REASONING: Final = "reasoning"
TOOL: Final = "tool"
INNER: Final = "inner"
NAKED: Final = "naked"
"""States. The first three are mlx-lm's own names, which response formats use. `INNER` is a tool block within
reasoning, `NAKED` a call without the markers of its block."""


class MarkerPlace(NamedTuple):
    """State of the text, and the marker that led to it; the marker is empty at the start of an answer."""

    state: str
    marker: str = ""


@dataclass(frozen=True, slots=True)
class MarkerSet:
    """Markers in the text of a model: reasoning, tool calls and response format."""

    think: tuple[str, str] = ("", "")
    """Start and end of reasoning; empty if the model does not reason."""
    call: tuple[str, str] = ("", "")
    """Start and end of a block with one or more calls; empty if the model has no calls. If only the end is empty, a
    block ends with the answer."""
    naked: tuple[str, str] = ("", "")
    """Start and end of a call that a model writes without the markers of its block; both are part of the call. Empty
    if the model writes no such calls."""
    structure: tuple[str, ...] = ()
    """Markers that are removed from the text outside of reasoning and calls, such as the end of a message."""
    edges: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict[str, Sequence[tuple[str, str]]])
    """Edges of the response format as pairs of marker and next state, by state."""
    initial: str = ""
    """Initial state of the response format; empty without one."""

    def get_start_place(self, thinking: bool) -> MarkerPlace:
        """Return the state of the text at the start of an answer: the initial state of a response format, otherwise
        reasoning or normal. `thinking`: the prompt has started the reasoning."""
        return MarkerPlace(self.initial or (REASONING if thinking and self.think[1] else NORMAL))

    def build_transitions(self, tools: bool) -> dict[MarkerPlace, list[tuple[str, MarkerPlace]]]:
        """Return the edges of every reachable place, as pairs of marker and next place.

        Without `tools`, the request has no tools, and the markers of calls are ordinary text. Response formats are an
        exception, because only these markers separate their blocks.
        """
        edges = self._build_edges(tools)
        waiting = [self.get_start_place(False), self.get_start_place(True)]
        reached: dict[MarkerPlace, list[tuple[str, MarkerPlace]]] = {}
        while waiting:
            place = waiting.pop()
            if place not in reached:
                reached[place] = [(marker, MarkerPlace(state, marker)) for marker, state in edges.get(place.state, ())]
                waiting += [there for _, there in reached[place]]
        return reached

    def _build_edges(self, tools: bool) -> dict[str, list[tuple[str, str]]]:
        edges: dict[str, list[tuple[str, str]]] = {NORMAL: [], REASONING: []}
        if self.think[0]:
            edges[NORMAL].append((self.think[0], REASONING))
            edges[REASONING].append((self.think[1], NORMAL))
        formatted = any(state == TOOL for found in self.edges.values() for _, state in found)
        if self.call[0] and (tools or formatted):
            self._add_calls(edges, formatted)
        edges[NORMAL] += [(marker, NORMAL) for marker in self.structure]
        for state, found in self.edges.items():
            edges.setdefault(state, []).extend(found)
        return edges

    def _add_calls(self, edges: dict[str, list[tuple[str, str]]], formatted: bool) -> None:
        start, end = self.call
        if not formatted:
            edges[NORMAL].append((start, TOOL))
        if self.naked[0]:
            edges[NORMAL] += [(self.naked[0], NAKED), (end, NORMAL)]
            edges[NAKED] = [(self.naked[1], NORMAL)]
        if self.think[0]:
            edges[REASONING].append((start, INNER))
        edges[TOOL] = [(end, NORMAL)] if end else []
        edges[INNER] = [*edges[TOOL], (self.think[1], NORMAL)]
