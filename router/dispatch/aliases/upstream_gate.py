"""Upstreams in the dispatcher: whether an upstream may take a request now, and counts of the requests it took.

An upstream is used only as the last candidate of an alias, when no model before it can start now. The HTTP side passes
the request on (`router.http.upstream`).
"""

from collections.abc import Callable

from router.dispatch.active_request import ActiveRequest
from router.dispatch.circuit_breaker import CircuitBreakers
from router.dispatch.counters import Counters
from router.dispatch.request import Outcome
from router.dispatch.request_events import Event, UpstreamEnded
from router.settings import RouterSettings
from router.upstreams import get_upstream_label


class UpstreamGate:
    """Upstreams of the settings: which of them may take a request now, with totals of the requests they took.

    `apply` applies an event to a request. `clock` returns monotonic seconds. `counters` gets the totals.
    """

    def __init__(
        self,
        apply: Callable[[ActiveRequest, Event], None],
        clock: Callable[[], float],
        settings: RouterSettings,
        counters: Counters,
    ) -> None:
        self._apply = apply
        self._clock = clock
        self._counters = counters
        self._breakers: CircuitBreakers[str] = CircuitBreakers()
        self._labels = {name: get_upstream_label(name, upstream) for name, upstream in settings.upstreams.items()}

    def get_label(self, name: str) -> str:
        """Return the name of an upstream's model in answers, usage and metrics.

        Raise `KeyError` if the settings have no upstream `name`.
        """
        return self._labels[name]

    def find_obstacle(self, name: str) -> str:
        """Return why an upstream takes no request now, with its last failure; empty if it takes a request.

        An upstream with a half-open breaker takes one request as the probe.
        """
        state = self._breakers.get_state(name, self._clock())
        if state is None or state.state == "half open":
            return ""
        return f"not asked after failures in a row, the last one: {state.why}"

    def record_request(self, name: str, number: int) -> None:
        """Record that the request `number` was passed on to the upstream `name`.

        If the breaker of the upstream is half open, the request is the probe.
        """
        self._breakers.record_attempt(name, number, self._clock())

    def end_request(self, request: ActiveRequest, outcome: Outcome) -> None:
        """End a request that an upstream took with `outcome`. Do nothing if the request has already ended."""
        if request.outcome is None:
            self._apply(request, UpstreamEnded(outcome))

    def record_end(
        self, name: str, number: int, outcome: str, *, fault: str = "", prompt: int = 0, completion: int = 0
    ) -> None:
        """Record the end of request `number` at the upstream `name`, with its prompt and generated tokens.

        `outcome` is one of `router.dispatch.counters.UPSTREAM_OUTCOMES`. `fault` is the message of a failure that
        counts as a fault of the upstream; empty for any other end. A fault may open the breaker of the upstream. The
        outcome `ok` clears the faults of a closed breaker, and closes another breaker if the request was its probe.
        """
        self._counters.count_upstream(name, outcome, prompt, completion)
        if fault:
            self._breakers.record_fault(name, number, self._clock(), fault)
        elif outcome == "ok":
            self._breakers.record_success(name, number)
        else:
            self._breakers.record_departure(name, number)
