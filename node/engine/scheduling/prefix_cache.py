"""The prefix cache at work: what a row begins with, and what it leaves behind.

    begin ─► find ─► (gate) ─► restore ─► prefill ─► reached ─► … ─► prompt_written ─► decode ─► row_ended
             peeks             copies or     snapshots for caches    the prompt's own    the whole row,
                               takes         that cannot be cut      state               copied out

Rules
- Found is not had: the gate is asked in between, and may give the cache back. `restore` uses only what is still kept.
- A request pays for its whole prompt, found or not: a copy takes nothing until its first write, and then as much as if
  it had been written anew. So `need`, ledger and gate know nothing of all this.
- A conversation's next turn begins with *all* of a kept sequence, and will be kept itself. It takes the cache instead
  of copying it. When it is cancelled before it has left anything, it leaves what it took.
- Nothing is kept that does not fit by the same verdict as a request, and everything that is kept is evaluated at once.
- Kept bytes are first to go (`make_room`). They never cause a refusal.
- A request finds what its own key left behind, and of others only the system prompt that all keys share: the tokens of
  that message alone are kept once more in a scope of all keys, as a snapshot.
- After any fault of a model nothing of it is used again (`distrust`): the fault may lie in what was kept.

Where snapshots of a prompt are taken, for caches that cannot be cut
- Behind the last end-of-turn token: the user's message is the last thing that the next turn's prompt is sure to repeat.
  What follows (the opening of the answer, the marks of thinking) is the template's, and templates change it.
- Where the prompt parts from a kept one: another request has begun in the same way, with a system prompt most likely.
  The third finds it.
- Behind a system prompt that all keys share.
"""

import time
from collections.abc import Callable, Collection
from dataclasses import replace

from host.heap import trim
from node.engine.kv.kv_cache import Layers, Manner, copied, manner_of, nbytes_of, new_cache, owned
from node.engine.kv.prefix_store import LEAST, Entry, Found, PrefixCache, hash_of
from node.engine.kv.radix_trie import WIDTH, pack
from node.engine.memory.footprint import clear_pool
from node.engine.memory.gated_forward import Forwards
from node.engine.models.loaded_model import Resident
from node.engine.requests.sequence import Row
from node.engine.scheduling.decode_batch import DecodeBatch
from node.engine.scheduling.prefill import NOTHING, Past, Prefill
from wire.capacity.arithmetic import Fits, judge, lacks, row_bytes
from wire.frames import SHARED_SCOPE
from wire.report import CacheState, Memory
from wire.units import parse_size

ENDING = 64
"""Tokens from a prompt's end in which its last end-of-turn token is looked for."""
OPENING = 8
"""Tokens that a template may put behind the user's message where no token ends a turn."""
WORTH = 64
"""Tokens more than what is kept already, from which a beginning shared with others is worth a snapshot."""
AUTO, OFF = "auto", "off"
AUTO_SHARE = 0.15
"""Of the cap without the weights."""
SURE = 7 / 8
"""Share of the kept bytes that the system surely gets back: allocators keep parts of pages."""


def limit_of(setting: str | int, cap: int, weights: int) -> int:
    """Give the most bytes that may be kept, from `engine.mlx.prefix_cache`; 0: nothing is. `weights` are the bytes of
    all loaded models."""
    if setting == AUTO:
        return max(0, int(AUTO_SHARE * (cap - weights)))
    return 0 if setting == OFF else parse_size(setting)


class Reuse:
    """`limit(cap)` gives the most bytes that may be kept under a cap; `released()` hears that memory was given back."""

    def __init__(self, forwards: Forwards, limit: Callable[[int], int], released: Callable[[], None]) -> None:
        self._forwards = forwards
        self._limit = limit
        self._released = released
        self._kept: PrefixCache[Layers] = PrefixCache()
        self._manners: dict[str, Manner] = {}

    # what the engine asks

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept."""
        return self._kept.nbytes

    @property
    def entries(self) -> tuple[Entry[Layers], ...]:
        """Kept entries, least recently used first."""
        return self._kept.entries

    @property
    def reusable(self) -> int:
        """Bytes that are surely free once all is given back."""
        return int(self._kept.nbytes * SURE)

    def state(self) -> CacheState:
        """Say what is kept and what it was good for."""
        return self._kept.state()

    def make_room(self, need: int) -> bool:
        """Give back what was least recently used until `need` bytes fit, and no more than that; nothing at all if all
        of it would not do. Say whether they fit."""
        return _fits(self._memory(), need - self.nbytes) and self.give(need)

    def give(self, need: int) -> bool:
        """Give back what was least recently used until `need` bytes fit or nothing is left; say whether they fit."""
        memory = self._memory()
        while self.nbytes and lacks(memory, need):
            self._kept.evict(max(1, need - (memory.headroom or 0)))
            clear_pool()
            trim()
            self._released()
            memory = self._memory()
        return _fits(memory, need)

    def relieve(self, enough: Callable[[], bool]) -> None:
        """Give back what was least recently used until it is `enough` or nothing is left."""
        while self.nbytes and not enough():
            self._kept.evict(1)
            clear_pool()
            trim()
            self._released()

    def drop(self, model: str) -> None:
        """Give back all of a model that leaves."""
        self._kept.drop(model)
        self._manners.pop(model, None)

    def distrust(self, model: str) -> None:
        """Use nothing again that was kept of a model before it failed."""
        self._kept.drop(model)

    # a prompt

    def begin(self, prefill: Prefill) -> None:
        """Look the prefill's tokens up, of a new request or of a row that was preempted or rebuilt.

        `sequence.cached` is what a request began with: rows that come back do not change it."""
        if self._limit(self._memory().cap) <= 0 or self._manner(prefill.resident) is Manner.NEVER:
            return
        key, sequence = pack(prefill.ids), prefill.sequence
        prompt, scope = key[: len(sequence.prompt) * WIDTH], sequence.cache_scope
        sequence.prompt_hash = hash_of(f"{prefill.resident.found.fingerprint} {scope}", prompt)
        shared = 0 if scope == SHARED_SCOPE else sequence.prepared.shared
        prefill.past = Past(key, sequence.prompt_hash, sequence.prepared.eos, scope, shared)
        self.find(prefill)
        if not sequence.joined:
            sequence.cached = prefill.written

    def find(self, prefill: Prefill) -> None:
        """Look again, before the first chunk: what was kept when the request came may be gone, or better by now."""
        past, resident = prefill.past, prefill.resident
        if past is None or prefill.cache is not None:
            return
        cut = self._manner(resident) is Manner.CUT
        past.found = self._find(resident.name, past, cut=cut)
        prefill.written = past.found.length
        past.stops = [] if cut else stops(prefill.ids, past.eos, past.found.length, past.found.shared, past.shared)

    def _find(self, model: str, past: Past, *, cut: bool) -> Found[Layers]:
        """Find the longest beginning among the sequences of the request's own key and the shared system prompts."""
        own = self._kept.find(model, past.key, cut=cut, scope=past.scope)
        if past.shared <= own.length:
            return own
        opening = past.key[: (past.shared + 1) * WIDTH]  # of a prompt one token is left to compute
        common = self._kept.find(model, opening, cut=cut, scope=SHARED_SCOPE)
        return replace(common, shared=own.shared) if common.length > own.length else own

    def restore(self, prefill: Prefill) -> bool:
        """Give a prefill the cache that it begins with, empty or not; False when what was found has been given back
        since, so that the gate has to be asked for all of it."""
        past = prefill.past
        found = NOTHING if past is None else past.found
        entry = found.entry
        if entry is None:
            prefill.cache = new_cache(prefill.resident.model)
        elif entry.value is None:
            return False
        elif past is not None and entry.length == found.length and not entry.snapshot:
            prefill.cache, past.took = self._kept.take(entry), found.length
        else:
            prefill.cache = copied(entry.value, found.length)
        if past is not None:
            if not prefill.sequence.joined:
                prefill.sequence.cached = found.length
            past.found = NOTHING
        if found.length:
            self._kept.hit(found.length)
        return True

    def begins_anew(self, prefill: Prefill) -> None:
        """Hear that a prompt is read from its first token, whatever was found of it."""
        if not prefill.sequence.joined:
            prefill.sequence.cached = 0
        if prefill.past is not None:
            prefill.past.found = NOTHING

    def until(self, prefill: Prefill, count: int) -> int:
        """Shorten a chunk so that it ends where a snapshot is wanted."""
        stops = () if prefill.past is None else prefill.past.stops
        return min([count, *(stop - prefill.written for stop in stops if stop > prefill.written)])

    def reached(self, prefill: Prefill) -> None:
        """Take the snapshot that is wanted where a chunk has ended, if one is."""
        past, cache = prefill.past, prefill.cache
        if past is None or cache is None or prefill.written not in past.stops:
            return
        key = past.key[: prefill.written * WIDTH]
        scope = SHARED_SCOPE if prefill.written == past.shared else past.scope
        if not self._kept.covers(prefill.resident.name, key, cut=False, scope=scope) and self._room(nbytes_of(cache)):
            self._keep(prefill.resident, key, owned(cache), past.prompt_hash, scope, snapshot=True)

    def _share(self, prefill: Prefill, layers: Layers, transient: int) -> None:
        """Keep the tokens of a shared system prompt for all keys, where caches can be cut."""
        past = prefill.past
        if past is None or not past.shared:
            return
        name, key = prefill.resident.name, past.key[: past.shared * WIDTH]
        opening = copied(layers, past.shared)
        if not self._kept.covers(name, key, cut=True, scope=SHARED_SCOPE) and self._room(nbytes_of(opening), transient):
            self._keep(prefill.resident, key, owned(opening), b"", SHARED_SCOPE, snapshot=True)

    def prompt_written(self, prefill: Prefill, transient: int) -> None:
        """Keep the state of a whole prompt while its rows decode, where it can be cut: the next prompt may begin like
        it. The join copies it anyhow; `transient` is what it takes for that."""
        past, cache = prefill.past, prefill.cache
        if past is None or cache is None or self._manner(prefill.resident) is not Manner.CUT:
            return
        name, scope, past.took = prefill.resident.name, past.scope, 0
        self._share(prefill, cache, transient)
        covered = self._kept.covers(name, past.key, cut=True, scope=scope)
        if not covered and self._room(nbytes_of(cache), transient):
            self._kept.discard(self._kept.replaced(name, past.key, scope))
            self._keep(prefill.resident, past.key, cache.copy(), past.prompt_hash, scope)

    def read_together(self, prefill: Prefill, row: Layers, transient: int) -> None:
        """Keep the state of a prompt that was read with others: `row` views it among theirs, all but its last token. To
        be kept it is copied."""
        past = prefill.past
        if past is None:
            return
        name, key, scope = prefill.resident.name, past.key[:-WIDTH], past.scope
        self._share(prefill, row, transient)
        if not self._kept.covers(name, key, cut=True, scope=scope) and self._room(nbytes_of(row), transient):
            self._kept.discard(self._kept.replaced(name, key, scope))
            self._keep(prefill.resident, key, owned(row), past.prompt_hash, scope)

    def cancelled(self, prefill: Prefill) -> None:
        """Put back what a prefill took, unless something else was kept that begins so."""
        past, cache = prefill.past, prefill.cache
        if past is None or cache is None or not past.took:
            return
        key = past.key[: past.took * WIDTH]
        layers = copied(cache, past.took)
        if self._manner(prefill.resident) is Manner.CUT and self._room(nbytes_of(layers)):
            self._keep(prefill.resident, key, owned(layers), past.prompt_hash, past.scope)

    # an answer

    def row_ended(self, resident: Resident, row: Row, batch: DecodeBatch[Row]) -> None:
        """Keep a row that has come to its end, before it is dropped. Raises what the batch raises."""
        sequence = row.sequence
        if row.choice or not sequence.prompt_hash:
            return
        ids, cut = batch.ids(row), self._manner(resident) is Manner.CUT
        key, scope = pack(ids), sequence.cache_scope
        if len(ids) < LEAST or self._kept.covers(resident.name, key, cut=cut, scope=scope):
            return
        if self._room(row_bytes(resident.kv, len(ids))):
            if cut:
                self._kept.discard(self._kept.replaced(resident.name, key, scope))
            self._keep(resident, key, batch.extract(row), sequence.prompt_hash, scope)

    def _keep(
        self, resident: Resident, key: bytes, layers: Layers, prompt_hash: bytes, scope: str, *, snapshot: bool = False
    ) -> None:
        if len(key) >= LEAST * WIDTH:
            self._kept.store(Entry(resident.name, key, layers, nbytes_of(layers), prompt_hash, snapshot, scope))

    def _room(self, size: int, transient: int = 0) -> bool:
        """Whether `size` bytes may be kept; what is older goes for them."""
        memory = self._memory()
        limit = self._limit(memory.cap)
        if size > limit or not _fits(memory, size + transient - self.nbytes):
            return False
        if self.nbytes + size > limit:
            self._kept.evict(self.nbytes + size - limit)
            self._released()
        return self.make_room(size + transient)

    def _manner(self, resident: Resident) -> Manner:
        manner = self._manners.get(resident.name)
        if manner is None:
            manner = self._manners[resident.name] = manner_of(new_cache(resident.model))
        return manner

    def _memory(self) -> Memory:
        return self._forwards.memory(time.monotonic())


def stops(ids: list[int], eos: Collection[int], have: int, shared: int, system: int = 0) -> list[int]:
    """Return the places in a prompt at which a cache that cannot be cut is worth a snapshot (see the module's text);
    `have` tokens of it are there already, some kept sequence begins with `shared` of them, and the first `system` are a
    system prompt of all keys."""
    most = len(ids) - 1
    ends = (place for place in range(most, max(0, most - ENDING), -1) if ids[place - 1] in eos)
    turn = next(ends, most - OPENING)
    branch = shared if shared >= have + WORTH else 0
    places = min(branch, most), min(system, most), turn
    return sorted({place for place in places if place > have and place >= LEAST})


def _fits(memory: Memory, need: int) -> bool:
    return isinstance(judge(memory, need), Fits)
