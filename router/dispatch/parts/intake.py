"""Intake of requests: the model that the client means, the quota of its key, its prefix hashes, its seed."""

from collections.abc import Callable

from msgspec.structs import replace

from router.admission.cache_scope import CacheScopes
from router.admission.key_scope import visible
from router.admission.rate_limits import KeyLimits, RateLimits
from router.dispatch.active_request import ActiveRequest
from router.dispatch.parts.placer import Placer
from router.dispatch.request import RequestSpec
from router.placement.prefix_affinity import NOWHERE, PrefixAffinity, PrefixHashChain, chain_of
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

    def accept(self, job: RequestSpec, number: int, *, charges: bool) -> tuple[ActiveRequest, Refused | None]:
        """Return a new request with this number, and the refusal of its key's quota if it is over that.

        Unless it `charges` the quota, the request is not admitted.
        """
        limits, now = self._quotas.limits(job.key), self._clock()
        name = self.canonical_name(job.demand.model, limits)
        if name != job.demand.model:
            job = replace(job, demand=replace(job.demand, model=name))
        charged = self._quotas.admit(job.key, job.demand, now) if charges else None
        refused = charged if isinstance(charged, Refused) else None
        demand = job.demand
        if limits.labels and refused is None:
            demand = replace(demand, labels=frozenset(limits.labels))
        chain = self._chain(job)
        request = ActiveRequest(
            job,
            WeightedKey(job.key, limits.weight),
            number,
            now,
            demand=demand,
            params=self._seeded(job),
            charged=None if isinstance(charged, Refused) else charged,
            rates=self._quotas.rates(job.key, now) if charges else (),
            chain=chain,
            warm=NOWHERE if chain is None else self._affinity.shares(chain),
        )
        return request, refused

    def canonical_name(self, model: str, limits: KeyLimits) -> str:
        """Return the model that a client means (`ClusterView.canonical_name`), among those that its key may use."""
        view = self._placer.view
        if any(model in node.models for node in view.nodes):
            return model
        return visible(view, limits).canonical_name(model)

    def _seeded(self, job: RequestSpec) -> GenerationParams:
        """Return the parameters with a seed: without one, no other node could resume the answer with the same draws."""
        if job.params.seed is not None:
            return job.params
        return replace(job.params, seed=int(self._draw() * (1 << SEED_BITS)))

    def _chain(self, job: RequestSpec) -> PrefixHashChain | None:
        """Return the prefix hashes of a request; None where no choice of a node depends on them."""
        view = self._placer.view
        if len(view.nodes) <= 1 or (job.demand.prompt_bytes < MIN_AFFINITY_BYTES and not job.session):
            return None
        fingerprint = view.identity(job.demand.model).fingerprint
        root = (job.demand.model, fingerprint, job.tools, job.template, job.ids)
        messages = (Message("", job.text),) if job.text else job.messages
        shared = self._scopes.shares(messages)
        return chain_of(root, messages, job.session, self._scopes.of(job.key), shared=shared)
