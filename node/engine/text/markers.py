"""Which markers part a model's text, and what each of them begins.

mlx-lm's state machine cuts text at markers, but drops their words and says only the state that comes after. Here every
destination is a Place: the state together with the marker that led to it, so that whoever reads the cut text can put a
block together again exactly as it was written.

    normal ──think start──► reasoning ──think end──► normal
    normal ──call start───► tool ──────call end────► normal
    reasoning ──call start► inner ─────call end────► normal      a call without the end of the thought
                            inner ─────think end───► normal      no call: the thought only spoke of the marker

A model's own response format adds states and edges; text in states that are not named here is never shown.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

NORMAL: Final = "normal"
REASONING: Final = "reasoning"
TOOL: Final = "tool"
INNER: Final = "inner"
"""States. The first three are mlx-lm's own names, which response formats use; INNER is a tool block in a thought."""


class Place(NamedTuple):
    """A state and the marker that led to it, empty at the beginning."""

    state: str
    marker: str = ""


@dataclass(frozen=True, slots=True)
class Markup:
    """A model's markers: pairs of start and end, empty where it has none. A call's end may be empty alone: such a call
    ends with the answer. `structure` is dropped wherever it stands; `edges` and `initial` are the response format."""

    think: tuple[str, str] = ("", "")
    call: tuple[str, str] = ("", "")
    structure: tuple[str, ...] = ()
    edges: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict[str, Sequence[tuple[str, str]]])
    initial: str = ""

    def beginning(self, thinking: bool) -> Place:
        """Give the place where an answer begins. `thinking`: the prompt left a thought open."""
        return Place(self.initial or (REASONING if thinking and self.think[1] else NORMAL))

    def transitions(self, tools: bool) -> dict[Place, list[tuple[str, Place]]]:
        """Give every reachable place and its edges. Without `tools` a call's markers are words like any others, except
        in a response format, whose blocks cannot be told apart without them."""
        edges = self._edges(tools)
        waiting = [self.beginning(False), self.beginning(True)]
        reached: dict[Place, list[tuple[str, Place]]] = {}
        while waiting:
            place = waiting.pop()
            if place not in reached:
                reached[place] = [(marker, Place(state, marker)) for marker, state in edges.get(place.state, ())]
                waiting += [there for _, there in reached[place]]
        return reached

    def _edges(self, tools: bool) -> dict[str, list[tuple[str, str]]]:
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
        if self.think[0]:
            edges[REASONING].append((start, INNER))
        edges[TOOL] = [(end, NORMAL)] if end else []
        edges[INNER] = [*edges[TOOL], (self.think[1], NORMAL)]
