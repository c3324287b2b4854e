"""Memory of the scripted engine: simulated weights, real commitments and the real gate."""

from node.engine.kv.commitments import CommitmentLedger
from node.engine.memory.gate import GateSite, MemoryGate, MlxCounters
from node.memory.reading import MemoryReading, RecentPeak
from wire.refusals import Refused
from wire.report import KvParameters, Memory


class ScriptedMemory:
    """Memory of a simulated model, with its `ledger` of commitments and its `gate`.

    `weights` and `total`, the RAM, are in bytes. `kv_per_token` is the KV bytes of a token. `now` is in monotonic
    seconds in all methods.
    """

    def __init__(self, weights: int, total: int, kv_per_token: int, gate: MemoryGate) -> None:
        self.gate = gate
        self.ledger = CommitmentLedger(KvParameters(kv_per_token))
        self._weights = weights
        self._total = total
        self._recent = RecentPeak()

    def read(self, now: float) -> Memory:
        """Return a simulated reading of the memory at the monotonic time `now`, with the limits in force."""
        active = self._compute_active_bytes()
        use = MlxCounters(active, self._recent.find_highest(now), self.ledger.compute_reserved_bytes())
        return self.gate.build_memory(use, MemoryReading(active, "scripted", now), self._total, now)

    def check(self, site: GateSite, now: float, estimate: int = 0) -> Refused | None:
        """Check the gate for `estimate` bytes in addition to the commitments. Return the refusal; None if they fit."""
        answer = self.gate.check(site, self.read(now), estimate)
        return answer if isinstance(answer, Refused) else None

    def observe(self, now: float) -> None:
        """Update the recent peak with the memory at the monotonic time `now`."""
        self._recent = self._recent.with_reading(self._compute_active_bytes(), now)

    def restart_peak(self, now: float) -> None:
        """Restart the recent peak at the current memory, because memory was freed."""
        self._recent = RecentPeak().with_reading(self._compute_active_bytes(), now)

    def compute_peak_expiry(self, now: float) -> float | None:
        """Return the monotonic time at which the recent peak falls; None if only another reading can change it."""
        return self._recent.compute_peak_expiry(self._compute_active_bytes(), now)

    def _compute_active_bytes(self) -> int:
        return self._weights + self.ledger.compute_stored_bytes()
