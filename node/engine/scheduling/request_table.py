"""Table of the scheduler's live requests, with their prefills, preempted requests, and holds on models."""

import math
from collections.abc import Mapping

from node.engine.models.loaded_model import LoadedModel
from node.engine.models.model_stats import ModelHold
from node.engine.requests.sequence import Sequence
from node.engine.scheduling.prefill import Prefill


class RequestTable:
    """Requests of the scheduler that have not ended. Each holds its model in memory until its end."""

    def __init__(self) -> None:
        self._live: dict[int, Sequence] = {}
        self._holds: dict[int, ModelHold] = {}
        self._prefills: list[Prefill] = []
        self._preempted: list[Sequence] = []
        self._ended_on: dict[str, LoadedModel] = {}
        self._crowded = False
        self.crowded_at = -math.inf
        """Monotonic time of the last `record_ends` after a request ended while another was live; minus infinity before
        that."""

    @property
    def live(self) -> Mapping[int, Sequence]:
        """Requests that have not ended, by the coordinator's number."""
        return self._live

    @property
    def prefills(self) -> list[Prefill]:
        """Prefills with rows that have not joined a decode batch, in the order of the queue. Callers must not change
        the list."""
        return self._prefills

    @property
    def preempted(self) -> list[Sequence]:
        """Preempted requests, which hold no memory and are prefilled again when there is room. Callers must not change
        the list."""
        return self._preempted

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.number in self._live

    def list_running(self) -> list[Sequence]:
        """Return the requests that are not preempted, oldest first."""
        return sorted(
            (sequence for sequence in self._live.values() if sequence not in self._preempted),
            key=lambda sequence: sequence.age,
        )

    def add(self, loaded_model: LoadedModel, sequence: Sequence) -> None:
        """Add a request, and hold its model in memory until `remove`."""
        self._live[sequence.number] = sequence
        self._holds[sequence.number] = loaded_model.usage.hold()

    def remove(self, loaded_model: LoadedModel, sequence: Sequence) -> None:
        """Remove a live request that has ended, and release its hold on the model. Its prefills stay in the table.

        The next `record_ends` marks the model as used.
        """
        del self._live[sequence.number]
        self._holds.pop(sequence.number).release()
        self._ended_on[loaded_model.name] = loaded_model
        self._crowded |= bool(self._live)

    def record_ends(self, now: float) -> None:
        """Record the monotonic time `now` as the last use of each model whose requests were removed since the last
        call. Set `crowded_at` to `now` if other requests were live at such a removal."""
        if not self._ended_on:
            return
        for loaded_model in self._ended_on.values():
            loaded_model.usage.mark_used(now)
        self._ended_on.clear()
        if self._crowded:
            self.crowded_at, self._crowded = now, False

    def enqueue(self, prefill: Prefill, *, first: bool = False) -> None:
        """Add a prefill at the end of the queue, or with `first` at its start."""
        self._prefills.insert(0 if first else len(self._prefills), prefill)

    def dequeue(self, prefill: Prefill) -> None:
        """Remove a prefill from the queue, because all its rows have joined."""
        self._prefills.remove(prefill)

    def clear_prefills(self, sequence: Sequence) -> None:
        """Remove a request's prefills and release their arrays. Must be called before `release_free_memory`, because
        arrays released later would stay in MLX's free buffers."""
        for prefill in [prefill for prefill in self._prefills if prefill.sequence is sequence]:
            prefill.clear()
            self._prefills.remove(prefill)

    def add_preempted(self, sequence: Sequence) -> None:
        """Add a request to the preempted requests."""
        self._preempted.append(sequence)

    def end_preemption(self, sequence: Sequence) -> bool:
        """Remove a request from the preempted requests. Return False if it is not preempted."""
        if sequence not in self._preempted:
            return False
        self._preempted.remove(sequence)
        return True

    def close(self) -> None:
        """Release the memory of all prefills and the holds on models, and remove all requests, because the process
        ends."""
        for sequence in self._live.values():
            self.clear_prefills(sequence)
        for hold in self._holds.values():
            hold.release()
        self._holds.clear()
        self._live.clear()
        self._preempted.clear()
