"""Placement of requests that name an alias: its candidates are tried in order at every attempt.

The first candidate that can start now gets the request. If none can, the request goes to the upstream of the alias if
possible. Otherwise it waits for the first candidate that could ever take it. A retry begins again with the first one.
The candidate is fixed once the client has the head of a stream or tokens exist, because the answer names its model.
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
    """Placement of requests that name an alias, on the candidates of that alias: its models and its upstream.

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
        """Compute and record the placement of a request, with the first candidate of its alias that can start now.

        If no candidate can, the request uses the one that `AliasCandidates.choose` returns. The result is then the
        placement of that candidate if only `CrowdRules` makes the request wait, else one refusal with the reasons of
        all candidates. The upstream's obstacle is updated as well. A request that may not change its model is placed
        with its model only.
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

        Call this after `decide`, which finds the obstacle of the upstream.
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
        """Call `start` with the refusal of each candidate that may wait, until a call returns True.

        Return whether a call did. Each candidate is in use during its call; if no call returned True, the former one is
        in use again. For a request that may not change its model, `start` is called once, with `result`.
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
        """Use each candidate of the alias in turn and call `start`, until a call returns True. Return whether a call
        did.

        If no call returned True, the former candidate is in use again. For a request that may not change its model,
        return False without a call.
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
        """Record why candidates were passed over, for `cluster explain`."""
        now = self._clock()
        for model, result in zip(alias.models, results, strict=False):
            reason = get_reason(result, model)
            if alias.set_reason(model, reason):
                request.add_step(now, f"passed over {model}: {reason}")


def may_change_model(request: ActiveRequest) -> bool:
    """Return whether a request may use another candidate of its alias: nothing of its answer exists yet.

    Return False without an alias.
    """
    return request.alias is not None and not request.answer.opened and not request.tokens.longest


def may_restart_with_other_model(request: ActiveRequest) -> bool:
    """Return whether a request may begin again with another candidate: its client has nothing of the answer.

    Unlike for `may_change_model`, tokens may have arrived from a node. Return False without an alias.
    """
    return request.alias is not None and not request.answer.opened and not request.answer.begun
