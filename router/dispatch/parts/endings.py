"""Ends of requests: pass the outcome to the reader, settle the quota of the key, and update the counters."""

from collections.abc import Callable

from msgspec.structs import replace

from router.admission.rate_limits import RateLimits
from router.dispatch.accounting import Accounting
from router.dispatch.active_request import ActiveRequest
from router.dispatch.parts.placer import Placer
from router.dispatch.request import RequestFailure
from router.dispatch.request_events import EndRequest, Event, HandOver, RequestDenied
from wire.refusals import RefusalCode, Refused


class Endings:
    """Performer of the actions at the end of a request. It also denies the requests that no node takes.

    `apply` applies an event to a request. `clock` returns monotonic seconds.
    """

    def __init__(
        self,
        apply: Callable[[ActiveRequest, Event], None],
        clock: Callable[[], float],
        *,
        placer: Placer,
        accounting: Accounting,
        quotas: RateLimits,
    ) -> None:
        self._apply = apply
        self._clock = clock
        self._placer = placer
        self._accounting = accounting
        self._quotas = quotas

    def deny(self, request: ActiveRequest, refused: Refused) -> None:
        """End a request that no node takes, as refused.

        If an attempt was lost and the client has a part of the answer, end the request as failed instead. For a key
        with a list of models, the message about an unknown model names no other models.
        """
        lost_by = request.life.lost_by
        if refused.code is RefusalCode.NO_MODEL and self._quotas.get_limits(request.spec.key).models:
            # the message names similar models, which the key may not use
            refused = replace(refused, message=f"no node serves the model {request.demand.model[:256]!r}")
        if lost_by is None or not request.answer.begun:
            self._apply(request, RequestDenied(refused))
            return
        text = f"{lost_by.message}; no other node can resume the answer: {refused.message}"
        self._apply(request, RequestDenied(RequestFailure(lost_by.code, text)))

    def end(self, request: ActiveRequest, action: EndRequest) -> None:
        """Record the request in usage, counters and history, and pass the outcome to the reader.

        This also settles the charge of the key's quota.
        """
        model = request.spec.demand.model if request.life.attempts else self._find_counted_model(request)
        self._accounting.record_end(request, action.outcome, model, self._quotas, self._clock())
        request.answer.end(action.outcome)

    def announce_upstream(self, request: ActiveRequest, action: HandOver) -> None:
        """Ask the reader to pass the request on to an upstream, and record a step."""
        request.add_step(self._clock(), f"passed on to {request.demand.model}")
        request.answer.set_upstream(action.upstream)

    def _find_counted_model(self, request: ActiveRequest) -> str:
        """Return the model name for the counters of a request without attempts; empty for a name that no member has.

        An invented name must not add a row to the database.
        """
        model = request.spec.demand.model
        uses_upstream = request.alias is not None and request.alias.uses_upstream
        known = uses_upstream or self._placer.view.has_model(model)
        return model if known else ""
