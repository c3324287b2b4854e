"""Memory of a simulated node: weights, commitments, ended chats and leases, checked by the arithmetic of the gate."""

from node.engine.memory.gate import GateSite
from simulation.mac.ended_chats import CACHE_SHARE, EndedChat, EndedChats
from simulation.mac.hardware import BASE, compute_default_cap
from simulation.mac.node_models import NodeModels, SimulatedModel, sum_weights
from wire.capacity.arithmetic import Fits, compute_current, compute_default_margin, compute_headroom, judge
from wire.capacity.batches import compute_row_bytes
from wire.refusals import Refused
from wire.report import Memory


class NodeMemory:
    """Memory of a simulated node with `total` bytes of RAM. `now` is in virtual seconds in all methods.

    The scripted engine uses this object as its memory (`node.engine.scripted.preemption.BatchMemory`).
    """

    def __init__(self, total: int, models: NodeModels, chats: EndedChats) -> None:
        self._total = total
        self._models = models
        self._chats = chats
        self._cap = compute_default_cap(total)
        self._margin = compute_default_margin(self._cap)
        self._leases = 0
        self.highest = 0
        """Highest footprint of all reports in bytes; 0 before the first."""

    def read(self, now: float, *, reported: bool = False) -> Memory:
        """Return the memory at `now` (virtual seconds).

        `reported` is whether the result is for a report. Then the KV of tokens computed so far counts as active memory,
        chats count as reusable, and `highest` is updated. Otherwise that KV counts as reserved; the sum is the same.
        """
        stored = committed = 0
        for model in self._models:
            if len(model.ledger):
                committed += model.ledger.compute_committed_bytes()
                if reported:
                    stored += model.ledger.compute_stored_bytes()
            if model.loaded:
                stored += model.model.weights
                committed += model.model.weights
            elif model.loading:
                stored += int(model.model.weights * model.compute_progress(now))
                committed += model.model.weights
        active = stored + self._chats.nbytes
        ceiling, phys, reserved = max(1, self._cap - self._leases), active + BASE, committed - stored
        if reported:
            self.highest = max(self.highest, phys)
        return Memory(
            cap=self._cap,
            ceiling=ceiling,
            margin=self._margin,
            phys=phys,
            active=active,
            recent=0,
            current=compute_current(active, phys, 0),
            reserved=reserved,
            headroom=compute_headroom(ceiling, self._margin, phys, reserved),
            leases=self._leases,
            bound_by="metal",
            armed=True,
            source="modelled",
            total=self._total,
            base=BASE,
            reusable=self._chats.nbytes if reported else 0,
        )

    # the gate

    def check(self, site: GateSite, now: float, estimate: int = 0) -> Refused | None:
        """Check whether `estimate` bytes fit in addition to the commitments. Return None, or the refusal.

        Evict ended chats and unload idle models if that makes room. `site` has no effect.
        """
        return self.check_for(estimate, now, None)

    def check_for(self, need: int, now: float, keep: SimulatedModel | None) -> Refused | None:
        """Check whether `need` bytes fit in addition to the commitments. Return None, or the refusal.

        Evict ended chats and unload idle models if that makes room. The model `keep` is never unloaded; with None, any
        idle model may be unloaded.
        """
        if isinstance(judge(self.read(now), need), Fits):
            return None
        self._free(need, now, keep)
        answer = judge(self.read(now), need)
        return answer if isinstance(answer, Refused) else None

    def observe(self, now: float) -> None:
        """Do nothing: the modelled memory has no peaks."""

    def compute_peak_expiry(self, now: float) -> float | None:
        """Return None, because the modelled memory has no peaks."""
        return None

    def _free(self, need: int, now: float, keep: SimulatedModel | None) -> None:
        """Evict ended chats, oldest first, then unload idle models, least recently used first, until `need` bytes fit.

        Release nothing if all of it would not be enough.
        """
        idle = self._models.list_idle(keep)
        if (self.read(now).headroom or 0) + self._chats.nbytes + sum_weights(idle) < need:
            return
        while self._chats and not isinstance(judge(self.read(now), need), Fits):
            self._chats.evict_oldest()
        while idle and not isinstance(judge(self.read(now), need), Fits):
            idle.pop(0).unload()

    # changes

    def change_lease(self, size: int, now: float) -> bool:
        """Lease `size` bytes to a video. Return False without a lease if they do not fit.

        Evict ended chats and unload idle models if that makes room. A negative size ends a lease of that size.
        """
        if size > 0 and self.check_for(size, now, None) is not None:
            return False
        self._leases += size
        return True

    def keep_chat(self, session: str, model: SimulatedModel, tokens: int, now: float) -> None:
        """Replace the cached turn of a chat by its ended turn, which has `tokens` tokens including the prompt.

        Evict the least recently used chats to keep all chats within `CACHE_SHARE`. If the turn does not fit, only
        discard the previous one. Do nothing if `session` is empty.
        """
        if not session:
            return
        self._chats.discard(session)
        size, limit = (
            compute_row_bytes(model.model.kv, tokens),
            int((self._cap - self._models.sum_loaded_bytes()) * CACHE_SHARE),
        )
        if size > limit:
            return
        while self._chats.nbytes + size > limit:
            self._chats.evict_oldest()
        if isinstance(judge(self.read(now), size), Fits):
            self._chats.put(session, EndedChat(model.spec.name, tokens, size))
