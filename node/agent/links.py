"""Links of this node to the coordinator, and the requests that came over each of them.

Rules
- A request belongs to the link that it came on. No frame of a request is sent on another link, except its failure
  when the older of two links is lost. Clients get one answer.
- A second link replaces the first after a renewal of the certificate. The first is closed when its last request has
  ended, or aborted when the second is lost.
"""

from collections.abc import Iterator

from node.agent.connection import CoordinatorLink
from node.notifier import Notifier
from wire.codec import decode, encode
from wire.frames import TAGS, Admitted, Deltas, Failed, Finished, Frame, Refusal
from wire.refusals import FailureCode


class CoordinatorLinks:
    """Open links to the coordinator, with the open requests of each. At most one of them is the current link."""

    def __init__(self) -> None:
        self._links: set[CoordinatorLink] = set()
        self._current: CoordinatorLink | None = None
        self._newest: CoordinatorLink | None = None
        self.request_ended = Notifier()
        """Notifies after the last frame of each request, but not after a cancel or the loss of its link."""

    @property
    def current(self) -> CoordinatorLink | None:
        """Link that the coordinator accepted last; None if that link has ended or none was accepted."""
        return self._current

    @property
    def watched(self) -> CoordinatorLink | None:
        """Link to watch for silence of the coordinator: the current link if it is open, else the newest link if open.

        None if neither is open.
        """
        candidates = (self._current, self._newest)
        return next((link for link in candidates if link is not None and link in self._links and link.open), None)

    @property
    def open_requests(self) -> int:
        """Number of requests that have not ended, on all links."""
        return sum(len(link.requests) for link in self._links)

    def add(self, link: CoordinatorLink) -> None:
        """Add a link whose connection is open."""
        self._links.add(link)
        self._newest = link

    def accept(self, link: CoordinatorLink) -> None:
        """Make a link that the coordinator accepted the current one.

        Close the previous current link if it has no request.
        """
        before, self._current = self._current, link
        if before is not None and before is not link:
            _close_unused(before)

    def remove(self, link: CoordinatorLink) -> None:
        """Remove a link whose connection has ended.

        If the link was the current one, abort all older links with requests, because the coordinator then resumes all
        requests of the node elsewhere. Otherwise send, on the current link if there is one, the failure `LINK_LOST` of
        each request of the removed link.
        """
        self._links.discard(link)
        if link is self._current:
            self._current = None
            for older in tuple(self._links):
                if older.requests:
                    older.abort("the newer of two links to the coordinator was lost")
        elif self._current is not None:
            for request in link.requests:
                self._current.send(
                    Failed(request, FailureCode.LINK_LOST, "the older of two links to the node was lost")
                )

    def send(self, frame: Frame) -> None:
        """Send a frame on the current link. Discard the frame without a current link."""
        if self._current is not None:
            self._current.send(frame)

    def close_all(self) -> None:
        """Close all links."""
        for link in tuple(self._links):
            link.close()

    def abort_all(self, reason: str) -> None:
        """Abort all connections. `reason` is the reason in the log."""
        for link in tuple(self._links):
            link.abort(reason)

    def cancel(self, request: int) -> None:
        """Remove a request that the coordinator cancelled. Close its link if that is not current and has no requests.

        No frame is sent. An unknown request is ignored.
        """
        for link in tuple(self._links):
            if request in link.requests:
                link.requests.discard(request)
                self._close_if_replaced(link)

    def fail_all(self, reason: str) -> Iterator[int]:
        """End every request with the failure `node_stopping` and the message `reason`.

        Yield the number of each request before the request ends. A request ends only when the caller takes the next
        number.
        """
        for link in tuple(self._links):
            for request in tuple(link.requests):
                yield request
                link.send(Failed(request, FailureCode.NODE_STOPPING, reason))
                self._end(link, request)

    def forward_from_engine(self, tag: int, encoded: bytes, request: int) -> None:
        """Send an encoded frame of the engine on the link of its request, and `Deltas` on the links of their requests.

        `tag` is the tag of the frame, `request` the number of its request. An `Admitted` frame is not urgent and is
        sent together with the next frame. `Finished`, `Refusal` and `Failed` end the request, and close a replaced link
        without further requests. Frames of requests that are cancelled, or whose link was lost, are discarded.
        """
        kind = TAGS.get(tag)
        if kind is Deltas:
            self._forward_step(encoded)
            return
        for link in tuple(self._links):
            if request in link.requests:
                if kind is Admitted:
                    link.send_with_next(encoded)
                    continue
                link.send_in_order(encoded)
                if kind in (Finished, Refusal, Failed):
                    self._end(link, request)

    def _forward_step(self, encoded: bytes) -> None:
        users = [link for link in self._links if link.requests]
        if len(users) == 1:
            users[0].send_in_order(encoded)
            return
        step = decode(encoded[4], encoded[5:])
        assert isinstance(step, Deltas)  # noqa: S101  the tag was read by the caller
        for link in users:
            mine = tuple(delta for delta in step.deltas if delta.request in link.requests)
            if mine:
                link.send_in_order(encode(Deltas(mine)))

    def _end(self, link: CoordinatorLink, request: int) -> None:
        link.requests.discard(request)
        self._close_if_replaced(link)
        self.request_ended.notify()

    def _close_if_replaced(self, link: CoordinatorLink) -> None:
        if link is not self._current:
            _close_unused(link)


def _close_unused(link: CoordinatorLink) -> None:
    if not link.requests:
        link.close_after_answers()
