"""Several short prompts in one forward.

A forward reads the weights once, however many rows it has, and rows that join at once copy the decode batch once; rows
that begin together also decode together, so fewer steps are narrow ones. So whole prompts that wait are padded *right*
and written into one cache. Attention is causal: no token sees what stands to its right, hence none of the padding, and
what a row's cache then holds before its end is what it would hold by itself.

- The last token of each is left out. It is the row's input to its first decode step, which computes the logits of all
  rows at once; here logits would be computed of every token, a gigabyte with a large vocabulary.
- Only plain caches take part (`cache.plain`): a window or a running state would take the padding in.
- Who begins with much that is kept, or like another one of them, waits for its turn: that need not be read at all.
- Who shares a forward shares the ledger's batch, so that rows × longest is promised already.
- A fault here is nobody's: all are read again one by one, and the one that is guilty fails by itself. In the record of
  calls, too, it serves many.
"""

import time
from collections.abc import Sequence

import mlx.core as mx

from node.engine.kv.kv_cache import Layers, TextModel, evaluate, extent_of, new_cache, room_of
from node.engine.kv.prefix_store import LEAST
from node.engine.memory.gate import Site
from node.engine.memory.gated_forward import Forwards
from node.engine.models.loaded_model import FIRST_SPEED
from node.engine.process.interface import Doing
from node.engine.scheduling.chunk_policy import company
from node.engine.scheduling.prefill import Prefill
from node.engine.scheduling.prefix_cache import Reuse

PAD = 0
MUCH = 0.5
"""Of a prompt: where so much is kept it is read alone, for the rest only. With less, reading it whole costs less."""


class Together:
    """Chooses who is read together, and reads them. `most`: tokens of a forward, padding included."""

    def __init__(self, forwards: Forwards, reuse: Reuse, most: int) -> None:
        self._forwards = forwards
        self._reuse = reuse
        self._most = most

    def company(self, first: Prefill, waiting: Sequence[Prefill], most: int) -> list[Prefill]:
        """Choose who is read with the `first`, itself included, in at most `most` tokens."""
        if not self._shares(first):
            return [first]
        batch, members = _batch(first), [first]
        for one in waiting:
            if one.resident is first.resident and one is not first and _batch(one) == batch and self._shares(one):
                members += [one] * (not any(_alike(one, other) for other in members))
        places = company([len(one.ids) - 1 for one in members], min(most, self._most))
        return [members[place] for place in places]

    def _shares(self, prefill: Prefill) -> bool:
        """Whether a prompt may be read with others: it is whole, and little of it is kept."""
        if prefill.alone or prefill.cache is not None or len(prefill.rows) > 1 or not prefill.resident.plain:
            return False
        self._reuse.find(prefill)
        return len(prefill.ids) > 1 and prefill.written < MUCH * len(prefill.ids)

    def fitting(self, members: list[Prefill]) -> list[Prefill]:
        """Give the first of them that the gate lets through in one forward, by halving; none below two."""
        while len(members) > 1:
            estimate = members[0].resident.estimator.together(len(members), _longest(members))
            if self._forwards.passes(Site.PREFILL, estimate):
                return members
            self._forwards.shrinks += 1
            members = members[: (len(members) + 1) // 2] if len(members) > 2 else []
        return []

    def read(self, members: Sequence[Prefill]) -> Layers:
        """Write all but the last token of each; give the cache of all rows, in the order of `members`."""
        resident, longest = members[0].resident, _longest(members)
        rows = [one.ids[:-1] + [PAD] * (longest + 1 - len(one.ids)) for one in members]
        cache, count = new_cache(resident.model), len(rows) * longest
        expected = count / (resident.reads.late or FIRST_SPEED)
        with self._forwards.native(Doing.PREFILL, resident.name, 0, expected) as call:
            write(resident.model, rows, cache)
        resident.prefilled(count, time.monotonic() - call.since, longest / 2)
        resident.estimator.observe_together(len(rows), longest, self._forwards.height.above() - extent_of(cache).size)
        for one in members:
            self._reuse.begins_anew(one)
            commitment = one.rows[0].commitment
            one.written = commitment.written = len(one.ids)
            commitment.room = room_of(cache)
        return cache


def write(model: TextModel, rows: list[list[int]], cache: Layers) -> None:
    """Write rows of one length into a cache, without logits."""
    model(mx.array(rows), cache=cache)
    evaluate([layer.state for layer in cache])


def _longest(members: Sequence[Prefill]) -> int:
    return max(len(one.ids) for one in members) - 1


def _batch(prefill: Prefill) -> int:
    return prefill.resident.ledger.batch_of(prefill.rows[0].commitment)


def _alike(one: Prefill, other: Prefill) -> bool:
    """Return whether much of a prompt will be kept for it once another one is read."""
    length = max(LEAST, int(MUCH * len(one.ids)))
    if one.past is None or other.past is None or len(one.ids) <= length or one.ids[:length] != other.ids[:length]:
        return False
    return one.past.scope == other.past.scope or length <= min(one.past.shared, other.past.shared)
