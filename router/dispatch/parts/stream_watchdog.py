"""Watchdog of answers, which sends keep-alives on silent streams, and ends the streams of readers that fall behind.

Ending a stream ends and cancels only its own request.
"""

from collections.abc import Callable, Container
from dataclasses import dataclass

from router.dispatch.active_request import ActiveRequest
from router.dispatch.answer import MAX_ANSWER_CHARS, StreamedAnswer
from router.dispatch.counters import Counters
from router.dispatch.request import SLOW, RequestFailure
from router.dispatch.request_events import Event, Stopped
from wire.refusals import FailureCode


@dataclass(slots=True)
class _Progress:
    takes: int
    still_seconds: float

    def restart(self, takes: int) -> None:
        self.takes = takes
        self.still_seconds = 0.0

    def add_seconds(self, seconds: float) -> float:
        self.still_seconds += seconds
        return self.still_seconds


class StreamWatchdog:
    """Watchdog of all answers.

    `apply` applies an event to a request. `interval` is the time between two checks in seconds. An open stream that is
    blocked, and whose reader takes nothing for `slow_seconds`, is ended. A reader that gets no event for
    `keepalive_seconds` gets a keep-alive.
    """

    def __init__(
        self,
        apply: Callable[[ActiveRequest, Event], None],
        counters: Counters,
        *,
        interval: float,
        slow_seconds: float,
        keepalive_seconds: float,
    ) -> None:
        self._apply = apply
        self._counters = counters
        self._interval = interval
        self._slow_seconds = slow_seconds
        self._keepalive_seconds = keepalive_seconds
        self._progress: dict[int, _Progress] = {}

    def retain_requests(self, open_requests: Container[int]) -> None:
        """Remove the recorded progress of all requests whose numbers are not in `open_requests`."""
        for number in [number for number in self._progress if number not in open_requests]:
            del self._progress[number]

    def check(self, request: ActiveRequest) -> None:
        """Request a keep-alive for a stream without new events, or end the stream of a reader without progress.

        Each call counts as one interval. Collected answers, answers of an upstream, and streams that were ended before
        are skipped. A queued request is skipped while its stream is not open and it waits for no model swap.

        For all answers, discard the token ids if the node sent more tokens than the limit of the request.
        """
        request.tokens.discard_excess()
        answer = request.answer
        if not isinstance(answer, StreamedAnswer) or answer.upstream or answer.outcome is SLOW:
            return
        progress = self._progress.setdefault(request.number, _Progress(0, 0.0))
        if answer.takes != progress.takes:
            progress.restart(answer.takes)
            return
        if request.node is None and request.outcome is None and not answer.opened and not request.swap:
            progress.restart(answer.takes)  # queued, and a clean 503 is still possible
            return
        still_seconds = progress.add_seconds(self._interval)
        if answer.blocked and answer.opened:
            if still_seconds >= self._slow_seconds:
                self._end_slow(request, answer)
        elif still_seconds >= self._keepalive_seconds:
            answer.request_keepalive()

    def end_oversized(self, request: ActiveRequest) -> None:
        """End a stream that is not read, or a collected answer of more than `MAX_ANSWER_CHARS` characters.

        Call this method if `answer.buffered` exceeds the setting `slow_client_bytes`. A shorter collected answer
        continues.
        """
        if isinstance(request.answer, StreamedAnswer):
            self._end_slow(request, request.answer)
        elif request.answer.buffered > MAX_ANSWER_CHARS:
            text = f"the answer is longer than {MAX_ANSWER_CHARS} characters: use stream or lower max_tokens"
            self._apply(request, Stopped(RequestFailure(FailureCode.ANSWER_TOO_LONG, text)))

    def _end_slow(self, request: ActiveRequest, answer: StreamedAnswer) -> None:
        """End a stream whose reader does not read, even if its request has already ended."""
        self._counters.count_slow_client()
        answer.discard()
        if request.outcome is None:
            self._apply(request, Stopped(SLOW))
        else:
            answer.end_unread()
