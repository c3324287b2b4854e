"""Intake of requests: the model that the client means, the quota of its key, its prefix hashes, its seed."""

from collections.abc import Callable

from msgspec.structs import replace

from router.admission.cache_scope import CacheScopes
from router.admission.key_scope import filter_view
from router.admission.rate_limits import KeyLimits, RateLimits
from router.dispatch.active_request import ActiveRequest
from router.dispatch.parts.placer import Placer
from router.dispatch.request import RequestSpec
from router.placement.prefix_affinity import NOWHERE, PrefixAffinity, PrefixHashChain, compute_hash_chain
from wire.capacity.fairness import WeightedKey
from wire.frames import GenerationParams, Message
from wire.refusals import Refused

MIN_AFFINITY_BYTES = 1024
"""Minimum bytes of a prompt for prefix affinity: a shorter prompt is prefilled in an instant."""
SEED_BITS = 53
"""Bits of a seed that the router draws: those of a float."""


class Intake:
    """Intake of new requests. `clock` returns monotonic seconds, `draw` returns numbers in [0, 1)."""

    def __init__(
        self,
        clock: Callable[[], float],
        draw: Callable[[], float],
        *,
        placer: Placer,
        quotas: RateLimits,
        affinity: PrefixAffinity,
        scopes: CacheScopes,
    ) -> None:
        self._clock = clock
        self._draw = draw
        self._placer = placer
        self._quotas = quotas
        self._affinity = affinity
        self._scopes = scopes

    def accept(self, spec: RequestSpec, number: int, *, charges_quota: bool) -> tuple[ActiveRequest, Refused | None]:
        """Return a new request with this number, and the refusal if its key is over its quota.

        Without `charges_quota`, the quota is neither checked nor charged.
        """
        limits, now = self._quotas.get_limits(spec.key), self._clock()
        name = self.resolve_model_name(spec.demand.model, limits)
        if name != spec.demand.model:
            spec = replace(spec, demand=replace(spec.demand, model=name))
        charged = self._quotas.admit(spec.key, spec.demand, now) if charges_quota else None
        refused = charged if isinstance(charged, Refused) else None
        demand = spec.demand
        if limits.labels and refused is None:
            demand = replace(demand, labels=frozenset(limits.labels))
        chain = self._compute_hash_chain(spec)
        request = ActiveRequest(
            spec,
            WeightedKey(spec.key, limits.weight),
            number,
            now,
            demand=demand,
            params=self._add_seed(spec),
            charged=None if isinstance(charged, Refused) else charged,
            rates=self._quotas.list_rates(spec.key, now) if charges_quota else (),
            chain=chain,
            cached_shares=NOWHERE if chain is None else self._affinity.estimate_shares(chain),
        )
        return request, refused

    def resolve_model_name(self, model: str, limits: KeyLimits) -> str:
        """Return the name of the model that a client means (`ClusterView.resolve_name`), among those that its key may
        use."""
        view = self._placer.view
        if any(model in node.models for node in view.nodes):
            return model
        return filter_view(view, limits).resolve_name(model)

    def _add_seed(self, spec: RequestSpec) -> GenerationParams:
        """Return the parameters with a seed: without one, no other node could resume the answer with the same draws."""
        if spec.params.seed is not None:
            return spec.params
        return replace(spec.params, seed=int(self._draw() * (1 << SEED_BITS)))

    def _compute_hash_chain(self, spec: RequestSpec) -> PrefixHashChain | None:
        """Return the prefix hashes of a request; None where no choice of a node depends on them."""
        view = self._placer.view
        if len(view.nodes) <= 1 or (spec.demand.prompt_bytes < MIN_AFFINITY_BYTES and not spec.session):
            return None
        version = view.identify(spec.demand.model).version
        root = (spec.demand.model, version, spec.tools, spec.template, spec.ids)
        messages = (Message("", spec.text),) if spec.text else spec.messages
        shared = self._scopes.has_shared_prompt(messages)
        return compute_hash_chain(root, messages, spec.session, self._scopes.get_scope(spec.key), shared=shared)
