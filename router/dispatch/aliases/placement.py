"""Placement of requests that name an alias: every attempt tries the candidates of the alias in order.

The first candidate that can start now gets the request. If none can, the request goes to the upstream of the alias if
possible. Otherwise it waits for the first candidate that could ever take it. A retry begins with the first candidate
again. The candidate is fixed once the client has the head of a stream or tokens exist, because the answer names its
model.
"""

from collections.abc import Callable

from msgspec.structs import replace

from router.dispatch.active_request import ActiveRequest
from router.dispatch.aliases.candidates import AliasCandidates, CandidateState, UnusedCandidate, get_reason
from router.dispatch.aliases.upstream_gate import UpstreamGate
from router.dispatch.parts.crowding import CrowdRules
from router.dispatch.parts.intake import Intake
from router.dispatch.parts.placer import Placer
from router.dispatch.request_events import Event, HandedOver
from router.placement.candidate import NoPlacement, Placement
from router.placement.prefix_affinity import NOWHERE


class AliasPlacement:
    """Placement of requests, with the models and the upstream of the alias that a request names.

    A request without an alias is placed with its model. `apply` applies an event to a request. `clock` returns
    monotonic seconds.
    """

    def __init__(
        self,
        apply: Callable[[ActiveRequest, Event], None],
        clock: Callable[[], float],
        *,
        placer: Placer,
        intake: Intake,
        crowds: CrowdRules,
        gate: UpstreamGate,
    ) -> None:
        self._apply = apply
        self._clock = clock
        self._gate = gate
        self._placer = placer
        self._intake = intake
        self._crowds = crowds

    def decide(self, request: ActiveRequest) -> Placement | NoPlacement:
        """Return and record the placement of a request, with the first model of its alias that can start now.

        If no model can, the request uses the one that `AliasCandidates.choose` returns, and the obstacle of the
        upstream is updated. The result is the placement of that model if only `CrowdRules` makes the request wait.
        Otherwise it is one refusal with the reasons of all candidates. A request that may not change its model is
        placed with its current model only.
        """
        alias = request.alias
        if alias is None or not may_change_model(request):
            return self._placer.decide(request)
        results: list[Placement | NoPlacement] = []
        for at in range(len(alias.models)):
            self._use(request, alias, at)
            result = self._placer.decide(request)
            results.append(result)
            if isinstance(result, Placement) and not self._crowds.must_wait(request, result.chosen):
                self._record_passed_over(request, alias, results[:-1])
                return result
        alias.set_results(results)
        if alias.upstream:
            alias.set_obstacle(self._gate.find_obstacle(alias.upstream))
        self._record_passed_over(request, alias, results)
        at = alias.choose()
        self._use(request, alias, at)
        best = results[at]
        if isinstance(best, Placement):
            return best
        return NoPlacement(alias.combine_refusals(best), best.candidates, best.candidate)

    def start_upstream(self, request: ActiveRequest) -> bool:
        """Hand a request that no node can start now to the upstream of its alias. Return whether that was possible.

        Call this method after `decide`, which finds the obstacle of the upstream.
        """
        alias = request.alias
        if alias is None or not alias.upstream or alias.obstacle or not may_change_model(request):
            return False
        label = self._gate.get_label(alias.upstream)
        spec = replace(request.spec, demand=replace(request.spec.demand, model=label))
        demand = replace(request.demand, model=label)
        alias.use_upstream(request.use_candidate(CandidateState(spec, demand, request.tried, None, NOWHERE)))
        self._gate.record_request(alias.upstream, request.number)
        self._apply(request, HandedOver(alias.upstream))
        return True

    def offer(self, request: ActiveRequest, result: NoPlacement, start: Callable[[NoPlacement], bool]) -> bool:
        """Call `start` with the refusal of each model that can be waited for, in order, until a call returns True.

        Return whether a call returned True. Each model is in use during its call. If no call returned True, the former
        candidate is in use again. For a request that may not change its model, `start` is called once, with `result`.
        """
        alias = request.alias
        if alias is None or not may_change_model(request):
            return start(result)
        former = alias.at
        for at in alias.list_waitable():
            candidate = alias.results[at]
            self._use(request, alias, at)
            if isinstance(candidate, NoPlacement) and start(candidate):
                return True
        self._use(request, alias, former)
        return False

    def start_any(self, request: ActiveRequest, start: Callable[[], bool]) -> bool:
        """Use each model of the alias in order and call `start`, until a call returns True.

        Return whether a call returned True. If none did, the former candidate is in use again. For a request that may
        not change its model, return False without a call.
        """
        alias = request.alias
        if alias is None or not may_change_model(request):
            return False
        former = alias.at
        for at in range(len(alias.models)):
            self._use(request, alias, at)
            if start():
                return True
        self._use(request, alias, former)
        return False

    def _use(self, request: ActiveRequest, alias: AliasCandidates, at: int) -> None:
        if at == alias.at:
            return
        state = alias.take(at)
        if isinstance(state, UnusedCandidate):
            chain = self._intake.compute_hash_chain(state.spec)
            state = state.prepare(chain, self._intake.estimate_shares(chain))
        alias.store(at, request.use_candidate(state))

    def _record_passed_over(
        self, request: ActiveRequest, alias: AliasCandidates, results: list[Placement | NoPlacement]
    ) -> None:
        """Record as steps of the request why models were passed over, each reason once, for `cluster explain`."""
        now = self._clock()
        for model, result in zip(alias.models, results, strict=False):
            reason = get_reason(result, model)
            if alias.set_reason(model, reason):
                request.add_step(now, f"passed over {model}: {reason}")


def may_change_model(request: ActiveRequest) -> bool:
    """Return whether a request may use another candidate of its alias, because nothing of its answer exists yet.

    Return False for a request without an alias.
    """
    return request.alias is not None and not request.answer.opened and not request.tokens.longest


def may_restart_with_other_model(request: ActiveRequest) -> bool:
    """Return whether a request may begin again with another candidate, because its client has nothing of the answer.

    Unlike with `may_change_model`, a node may already have sent tokens. Return False for a request without an alias.
    """
    return request.alias is not None and not request.answer.opened and not request.answer.begun
