"""Intake of requests: find the model that the client means, charge the quota, hash the prompt, and draw a seed."""

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from router.admission.cache_scope import CacheScopes
from router.admission.model_names import ModelNames, ModelTarget
from router.admission.rate_limits import NO_LIMITS, KeyLimits, RateLimits
from router.dispatch.active_request import ActiveRequest
from router.dispatch.aliases.candidates import AliasCandidates
from router.dispatch.parts.placer import Placer
from router.dispatch.request import RequestSpec
from router.dispatch.resource_demand import find_features
from router.placement.prefix_affinity import NOWHERE, PrefixAffinity, PrefixHashChain, compute_hash_chain
from wire.capacity.fairness import WeightedKey
from wire.frames import NO_REPETITION_PENALTY, CountTokens, GenerationParams, Message
from wire.identity import NodeId
from wire.refusals import Refused

MIN_AFFINITY_BYTES = 1024
"""Minimum bytes of a prompt without a session for prefix affinity. A shorter prompt is prefilled in an instant."""
SEEDS = 1 << 53
"""Number of different seeds that the router draws. `draw` returns floats with 53 random bits."""


REPETITION = "repetition_penalty"


class Intake:
    """Intake of new requests. `clock` returns monotonic seconds. `draw` returns numbers in [0, 1).

    `upstreams_by_default` is the default of `KeyLimits.may_use_upstreams`.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        draw: Callable[[], float],
        *,
        names: ModelNames,
        placer: Placer,
        quotas: RateLimits,
        affinity: PrefixAffinity,
        scopes: CacheScopes,
        upstreams_by_default: bool = True,
    ) -> None:
        self._clock = clock
        self._draw = draw
        self.names = names
        self._placer = placer
        self._quotas = quotas
        self._affinity = affinity
        self._scopes = scopes
        self._upstreams_by_default = upstreams_by_default

    def accept(self, spec: RequestSpec, number: int, *, charges_quota: bool) -> tuple[ActiveRequest, Refused | None]:
        """Return a new request with the number `number`, and its refusal; None if it is accepted.

        The refusal says that the key is over its quota, or that the name of the model is refused. The request has the
        first candidate of the named model, the defaults of its profile, the key's labels and a seed. Unless
        `charges_quota`, the quota is neither checked nor charged.
        """
        limits, now = self._quotas.get_limits(spec.key), self._clock()
        target: ModelTarget | None = None
        refused: Refused | None = None
        charged: int | None = None
        if not self.names.is_plain(spec.demand.model, self._placer.view):
            resolved = self.resolve_model_name(spec.demand.model, limits)
            if isinstance(resolved, Refused):
                refused = resolved
            else:
                target, spec = resolved, self._apply_target(spec, resolved)
        if charges_quota and refused is None:
            charged_demand = spec.demand
            if target is not None and target.alias:
                charged_demand = replace(charged_demand, model=target.permitted)
            admitted = self._quotas.admit(spec.key, charged_demand, now, limits)
            if isinstance(admitted, int):
                charged = admitted
            else:
                refused = admitted
        demand = spec.demand
        if limits.labels and refused is None:
            demand = replace(demand, labels=frozenset(limits.labels))
        chain = self.compute_hash_chain(spec)
        request = ActiveRequest(
            spec,
            WeightedKey(spec.key, limits.weight),
            number,
            now,
            demand=demand,
            params=_mark_penalty(self._add_seed(spec), spec.set_penalties),
            charged=charged,
            rates=(
                self._quotas.list_rates(spec.key, now)
                if charges_quota and limits is not NO_LIMITS and limits.has_rate
                else ()
            ),
            chain=chain,
            cached_shares=NOWHERE if chain is None else self.estimate_shares(chain),
            alias=None if target is None else self._build_candidates(target, spec, limits),
        )
        if request.alias is not None:
            request.alias.add_unused(request.spec, request.demand, request.tried.lost)
        return request, refused

    def _build_candidates(self, target: ModelTarget, spec: RequestSpec, limits: KeyLimits) -> AliasCandidates | None:
        """Return the candidates of an alias, with the reason if its upstream may not take the request.

        Return None if the client named no alias.
        """
        if not target.alias:
            return None
        forbidden = ""
        if target.upstream and not limits.may_use_upstreams(self._upstreams_by_default):
            forbidden = "this API key may not send prompts to upstreams"
        elif target.upstream and not spec.may_leave_pool:
            forbidden = "it takes only chat completions, and completions of one prompt, in OpenAI's dialect"
        return AliasCandidates(target.alias, target.candidates, target.upstream, forbidden)

    def resolve_model_name(self, model: str, limits: KeyLimits) -> ModelTarget | Refused:
        """Return the target of the name of a model; a refusal if its profile is unknown or its alias is forbidden.

        An unknown name is returned unchanged, as the only candidate (`ModelNames.resolve`).
        """
        return self.names.resolve(model, self._placer.view, limits)

    def apply_profile_to_count(self, request: CountTokens, target: ModelTarget) -> CountTokens:
        """Return a count with the template arguments of the profile that its client named; unchanged without one."""
        if not target.profile:
            return request
        profile = self.names.get_profile(target.profile)
        return replace(request, template=profile.apply_to_template(request.template))

    def _apply_target(self, spec: RequestSpec, target: ModelTarget) -> RequestSpec:
        """Return the request for the first candidate. The profile gives values to parameters that it does not set."""
        if not target.profile:
            return replace(spec, demand=replace(spec.demand, model=target.candidates[0]))
        profile = self.names.get_profile(target.profile)
        params = profile.apply_to_params(spec.params, spec.set_penalties, default_limit=spec.default_limit)
        features = spec.demand.features | find_features(params)
        demand = replace(spec.demand, model=target.candidates[0], max_tokens=params.max_tokens, features=features)
        is_plain_text = bool(spec.text or spec.ids)
        return replace(
            spec,
            demand=demand,
            params=params,
            template=spec.template if is_plain_text else profile.apply_to_template(spec.template),
            profile=target.profile,
            set_penalties=spec.set_penalties
            if profile.repetition_penalty is None
            else spec.set_penalties | {REPETITION},
            context_limit=profile.context_limit or 0,
        )

    def _add_seed(self, spec: RequestSpec) -> GenerationParams:
        """Return the parameters with a seed, which lets another node resume the answer with the same draws."""
        if spec.params.seed is not None:
            return spec.params
        return replace(spec.params, seed=int(self._draw() * SEEDS))

    def estimate_shares(self, chain: PrefixHashChain | None) -> Mapping[NodeId, float]:
        """Return the share of a prompt, 0 to 1, that each node has in its prefix cache; empty without hashes."""
        return NOWHERE if chain is None else self._affinity.estimate_shares(chain)

    def compute_hash_chain(self, spec: RequestSpec) -> PrefixHashChain | None:
        """Return the prefix hashes of a request; None if the choice of a node cannot depend on them.

        Return None for embeddings and scores, for fewer than two nodes, and for a short prompt without a session.
        """
        if spec.demand.prompt_bytes < MIN_AFFINITY_BYTES and not spec.session:
            return None
        view = self._placer.view
        if spec.embed is not None or len(view.nodes) <= 1:
            return None
        version = view.identify(spec.demand.model).version
        root = (spec.demand.model, version, spec.tools, spec.template, spec.ids)
        messages = (Message("", spec.text),) if spec.text else spec.messages
        shared = self._scopes.has_shared_prompt(messages)
        return compute_hash_chain(root, messages, spec.session, self._scopes.get_scope(spec.key), shared=shared)


def _mark_penalty(params: GenerationParams, set_penalties: frozenset[str]) -> GenerationParams:
    """Return the parameters with `NO_REPETITION_PENALTY` in place of a repetition penalty that the client set to 1.

    For the value 1, a node would apply the default of the model.
    """
    if params.repetition_penalty != 1 or REPETITION not in set_penalties:
        return params
    return replace(params, repetition_penalty=NO_REPETITION_PENALTY)
