"""A link to the coordinator without a socket, which records the frames that the node sends."""

import asyncio
from typing import Any

from node.agent.connection import CoordinatorLink
from node.agent.links import CoordinatorLinks
from wire.codec import Splitter, decode
from wire.frames import Frame


class RecordedTransport(asyncio.Transport):
    """Transport of a link. `frames` has its frames in the order in which the node sent them.

    `times` has the seconds of the loop's clock at which each frame was written.
    """

    def __init__(self) -> None:
        super().__init__()
        self.frames: asyncio.Queue[Frame] = asyncio.Queue()
        self.times: list[float] = []
        self._splitter = Splitter()
        self._closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        for tag, body in self._splitter.feed(bytes(data)):
            self.frames.put_nowait(decode(tag, body))
            self.times.append(asyncio.get_running_loop().time())

    def is_closing(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._closed = True

    def abort(self) -> None:
        self._closed = True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


def open_recorded_link(links: CoordinatorLinks) -> tuple[CoordinatorLink, RecordedTransport]:
    """Return a new link, which is the current one of `links`, and its transport."""
    transport = RecordedTransport()
    link = CoordinatorLink("mac:8081", "c", lambda *_: None, lambda *_: None)
    link.connection_made(transport)
    links.add(link)
    links.accept(link)
    return link, transport
