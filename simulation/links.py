"""Links of a simulated pool. Frames arrive after the latency, in their order. A silent link holds them back."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from wire.frames import Frame
from wire.identity import NodeId


class _TravellingFrame(NamedTuple):
    due: float
    node: NodeId
    link: int
    frame: Frame


_Way = deque[_TravellingFrame]


class SimulatedLinks:
    """Links between the router and all nodes.

    `latency` is the delay of a frame in virtual seconds. `is_open(node)` returns whether a node has a link.
    `down(node, frame)` is called for each frame that arrives at a node. `up(frames)` is called with all frames that
    arrive at the router at one moment, as pairs of node and frame.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        latency: float,
        is_open: Callable[[NodeId], object],
        down: Callable[[NodeId, Frame], None],
        up: Callable[[list[tuple[NodeId, Frame]]], None],
    ) -> None:
        self._loop = loop
        self._latency = latency
        self._is_open = is_open
        self._receive_down = down
        self._receive_up = up
        self._numbers: dict[NodeId, int] = {}
        self._silent: dict[NodeId, list[tuple[bool, Frame]]] = {}
        self._up, self._down = _Way(), _Way()

    def get_link_number(self, node: NodeId) -> int:
        """Return the number of a node's link; 0 before the first."""
        return self._numbers.get(node, 0)

    def connect(self, node: NodeId) -> int:
        """Open a new link of a node, and return its number. Frames in transit on the earlier link are lost.

        Frames that a silent link holds are kept (`discard_held`).
        """
        self._numbers[node] = self.get_link_number(node) + 1
        return self._numbers[node]

    def send_up(self, node: NodeId, frame: Frame) -> None:
        """Send a frame of a node to the router. The frame is lost if the link ends before it arrives."""
        self._send_frame(self._up, node, frame)

    def send_down(self, node: NodeId, frame: Frame) -> None:
        """Send a frame of the router to a node. The frame is lost if the link ends before it arrives."""
        self._send_frame(self._down, node, frame)

    def _send_frame(self, way: _Way, node: NodeId, frame: Frame) -> None:
        due = self._loop.time() + self._latency
        way.append(_TravellingFrame(due, node, self.get_link_number(node), frame))
        if len(way) == 1:
            self._loop.call_at(due, self._deliver_due, way)

    def _deliver_due(self, way: _Way) -> None:
        """Deliver the due frames in order."""
        upward: list[tuple[NodeId, Frame]] = []
        while way and way[0].due <= self._loop.time():
            one = way.popleft()
            if one.link != self.get_link_number(one.node) or not self._is_open(one.node):
                continue
            if one.node in self._silent:
                self._silent[one.node].append((way is self._up, one.frame))
            elif way is self._up:
                upward.append((one.node, one.frame))
            else:
                self._receive_down(one.node, one.frame)
        if way:
            self._loop.call_at(way[0].due, self._deliver_due, way)
        if upward:
            self._receive_up(upward)

    def deliver_up(self, node: NodeId) -> None:
        """Deliver the frames in transit from a node to the router now.

        The router reads a broken connection to its end. Frames of earlier links of the node are lost.
        """
        link = self.get_link_number(node)
        upward = [(node, one.frame) for one in self._up if (one.node, one.link) == (node, link)]
        others = [one for one in self._up if one.node != node]
        self._up.clear()
        self._up.extend(others)
        self._receive_up(upward)

    # silence

    def is_silent(self, node: NodeId) -> bool:
        """Return whether a node's link is silent."""
        return node in self._silent

    def hold_frames(self, node: NodeId) -> None:
        """Hold all frames that arrive on a node's link, in both directions, until `end_silence`."""
        self._silent[node] = []

    def discard_held(self, node: NodeId) -> None:
        """Discard the held frames of a silent link, because the link is closed. Do nothing for any other link."""
        if node in self._silent:
            self._silent[node] = []

    def end_silence(self, node: NodeId) -> bool:
        """End the silence of a link. Return whether the link is still open.

        On an open link, send the held frames; otherwise they are lost. Raise `KeyError` if the link is not silent.
        """
        held = self._silent.pop(node)
        if not self._is_open(node):
            return False
        for upward, frame in held:
            self._send_frame(self._up if upward else self._down, node, frame)
        return True
