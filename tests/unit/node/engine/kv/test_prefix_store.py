"""The prefix store: storing, finding and evicting, without a cache of a model. Values are texts here."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.engine.kv.prefix_memory import compute_limit
from node.engine.kv.prefix_store import (
    BLOCK_TOKENS,
    MAX_EVICTIONS_REPORTED,
    MIN_PREFIX_TOKENS,
    CachedPrefix,
    DiskCopy,
    PrefixCache,
    PrefixHit,
    PrefixStore,
    hash_prompt,
)
from node.engine.kv.radix_trie import pack
from node.engine.scheduling.rules.snapshots import MAX_TEMPLATE_TOKENS, choose_snapshot_positions
from wire.report import CacheState

START = list(range(MIN_PREFIX_TOKENS))


def entry(*more: int, nbytes: int = 10, model: str = "m", snapshot: bool = False) -> CachedPrefix[str]:
    key = pack([*START, *more])
    return CachedPrefix(model, key, f"cache of {more}", nbytes, hash_prompt(model, key), snapshot)


def test_a_cache_that_can_be_cut_serves_whatever_it_shares():
    kept: PrefixCache[str] = PrefixCache()
    one = entry(1, 2, 3)
    kept.store(one)
    found = kept.find("m", pack([*START, 1, 9, 9]), cut=True)
    assert (found.entry, found.length, found.shared) == (one, MIN_PREFIX_TOKENS + 1, MIN_PREFIX_TOKENS + 1)
    assert kept.find("other", pack([*START, 1, 9]), cut=True).entry is None


def test_a_sequence_serves_its_own_scope_alone():
    kept: PrefixCache[str] = PrefixCache()
    one = CachedPrefix("m", pack([*START, 1, 2]), "a cache", 10, b"", scope="alice")
    other = CachedPrefix("m", pack([*START, 1, 3]), "a cache", 10, b"", scope="mallory")
    kept.store(one)
    asked = pack([*START, 1, 2, 3])
    assert kept.find("m", asked, cut=True, scope="alice").entry is one
    assert kept.find("m", asked, cut=True, scope="mallory") == PrefixHit(), "not even that something is shared"
    assert not kept.covers("m", one.key, cut=True, scope="mallory")
    assert kept.find_redundant("m", asked, "mallory") == []
    kept.store(other)
    assert kept.find("m", asked, cut=True, scope="mallory").entry is other
    assert kept.evict(10) == 10, "bytes are counted and evicted in order of use over all scopes"
    assert kept.find("m", asked, cut=True, scope="alice").entry is None
    kept.evict_model("m")
    assert (len(kept), kept.nbytes, kept.scopes) == (0, 0, frozenset()), "no key leaves anything behind"


def test_the_number_of_arrays_is_bounded_because_metal_bounds_its_buffers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("node.engine.kv.prefix_store.MAX_ARRAYS", 100)
    kept: PrefixCache[str] = PrefixCache()
    entries = [replace(entry(number), arrays=40) for number in range(3)]
    for one in entries[:2]:
        kept.store(one)
    kept.store(replace(entries[1]))  # in place of the same ids: its arrays count once
    assert [one.key for one in kept.entries] == [entries[0].key, entries[1].key]
    kept.store(entries[2])
    assert [one.key for one in kept.entries] == [entries[1].key, entries[2].key], "the least recently used has left"
    assert kept.get_state().evictions == 1
    kept.evict_model("m")
    kept.store(replace(entries[0], value="again", arrays=100))
    assert len(kept) == 1, "evicted arrays are free"


def test_a_cache_that_cannot_be_cut_serves_only_whole():
    kept: PrefixCache[str] = PrefixCache()
    kept.store(entry(1, 2, 3))
    found = kept.find("m", pack([*START, 1, 9, 9]), cut=False)
    assert (found.entry, found.length, found.shared) == (None, 0, MIN_PREFIX_TOKENS + 1)
    short = entry(1)
    kept.store(short)
    found = kept.find("m", pack([*START, 1, 9, 9]), cut=False)
    assert (found.entry, found.length) == (short, MIN_PREFIX_TOKENS + 1)


def test_one_token_is_always_left_to_compute():
    kept: PrefixCache[str] = PrefixCache()
    whole = entry(1, 2)
    kept.store(whole)
    assert kept.find("m", whole.key, cut=True).length == whole.length - 1
    assert kept.find("m", whole.key, cut=False).entry is None
    short = entry(1)
    kept.store(short)
    assert kept.find("m", whole.key, cut=False).length == whole.length - 1
    assert kept.find("m", whole.key, cut=True) == PrefixHit(short, whole.length - 1, whole.length), "nothing is cut"


def test_templates_alone_are_no_beginning():
    kept: PrefixCache[str] = PrefixCache()
    kept.store(entry(1))
    assert kept.find("m", pack([*START[:-1], 99, 98]), cut=True).entry is None


def test_a_cache_is_a_store():
    """A `find` before `store` is empty, and a stored entry is found until it is evicted. This holds for every store."""
    store: PrefixStore[str] = PrefixCache()
    asked = pack([*START, 1, 2])
    assert store.find("m", asked, cut=True).entry is None
    one = entry(1)
    store.store(one)
    assert store.find("m", asked, cut=True).entry is one
    assert store.evict(1) == one.nbytes
    assert store.find("m", asked, cut=True).entry is None


def test_the_least_recently_used_entries_are_evicted_up_to_the_request():
    kept: PrefixCache[str] = PrefixCache()
    entries = [entry(number, nbytes=10 + number) for number in range(4)]
    for one in entries:
        kept.store(one)
    kept.find("m", pack([*START, 0, 9]), cut=True)
    assert kept.evict(12) == 11 + 12
    assert [one.is_stored for one in entries] == [True, False, False, True]
    state = kept.get_state()
    assert (state.nbytes, state.entries, state.stores, state.evictions) == (23, 2, 4, 2)
    assert state.evicted == (entries[1].prompt_hash, entries[2].prompt_hash)
    assert kept.evict(2**60) == 23
    assert (len(kept), kept.nbytes) == (0, 0)


def test_what_was_given_back_holds_nothing():
    kept: PrefixCache[str] = PrefixCache()
    one = entry(1)
    kept.store(one)
    found = kept.find("m", pack([*START, 1, 2]), cut=True)
    kept.evict(1)
    assert found.entry is not None
    assert not found.entry.is_stored
    assert found.entry.value is None, "an earlier match must not keep the entry's memory"


def test_a_model_that_leaves_takes_its_own_with_it():
    kept: PrefixCache[str] = PrefixCache()
    kept.store(entry(1))
    kept.store(entry(1, model="other"))
    kept.evict_model("m")
    kept.evict_model("unknown")
    assert kept.find("m", pack([*START, 1, 2]), cut=True).entry is None
    assert kept.find("other", pack([*START, 1, 2]), cut=True).entry is not None


def test_a_longer_sequence_makes_its_beginnings_needless():
    kept: PrefixCache[str] = PrefixCache()
    short, other = entry(1), entry(2)
    kept.store(short)
    kept.store(other)
    longer = entry(1, 2, 3)
    assert kept.find_redundant("m", longer.key) == [short]
    assert not kept.covers("m", longer.key, cut=True)
    kept.remove_redundant([short])
    kept.remove_redundant([short])
    kept.store(longer)
    assert kept.covers("m", short.key, cut=True)
    assert not kept.covers("m", short.key, cut=False)
    assert kept.covers("m", longer.key, cut=False)
    assert kept.get_state().evictions == 0


@given(st.lists(st.tuples(st.sampled_from("sefd"), st.lists(st.integers(0, 3), max_size=4), st.integers(1, 50))))
def test_bytes_are_those_of_what_is_there(doings: list[tuple[str, list[int], int]]):
    kept: PrefixCache[str] = PrefixCache()
    stored: list[CachedPrefix[str]] = []
    for doing, ids, size in doings:
        if doing == "s":
            stored.append(entry(*ids, nbytes=size))
            kept.store(stored[-1])
        elif doing == "e":
            kept.evict(size)
        elif doing == "f":
            found = kept.find("m", pack([*START, *ids, 9]), cut=bool(size % 2))
            assert found.entry is None or found.entry.is_stored
        else:
            kept.remove_redundant(kept.find_redundant("m", pack([*START, *ids])))
        alive = [one for one in stored if one.is_stored]
        assert kept.nbytes == sum(one.nbytes for one in alive)
        assert len(kept) == len(alive) == len({one.key for one in alive})


def test_a_hash_names_the_ids_the_model_and_every_block_before():
    ids = list(range(2 * BLOCK_TOKENS + 7))
    assert hash_prompt("a", pack(ids)) == hash_prompt("a", pack(ids))
    assert (
        len(
            {
                hash_prompt("a", pack(ids)),
                hash_prompt("b", pack(ids)),
                hash_prompt("a", pack([9, *ids[1:]])),
                hash_prompt("a", pack(ids[:-1])),
            }
        )
        == 4
    )
    assert len(hash_prompt("a", pack(ids))) == 16


def test_a_hash_is_the_same_in_every_version():
    """Nodes and coordinator compare hashes. A changed hash makes every cached prompt unknown."""
    found = [hash_prompt("f", pack(list(range(count)))).hex() for count in (0, 1, BLOCK_TOKENS, BLOCK_TOKENS + 1)]
    assert found == [
        "178ae0acf7f5c5ab692c698ac329d4fd",
        "9593934efb6da2e1eb5f95aa4b8abcd5",
        "3f306267e16eae86cbdb83de31397619",
        "12e73bce091ef1e3e6e3dead170d2676",
    ]


def test_a_beginning_serves_from_its_least_length_on():
    kept: PrefixCache[str] = PrefixCache()
    one = entry(1)
    kept.store(one)
    assert kept.find("m", pack([*START, 9]), cut=True) == PrefixHit(one, MIN_PREFIX_TOKENS, MIN_PREFIX_TOKENS)
    assert kept.find("m", pack([*START[:-1], 9, 9]), cut=True) == PrefixHit(None, 0, MIN_PREFIX_TOKENS - 1)
    exact = entry()
    kept.store(exact)
    assert kept.find("m", pack([*START, 9]), cut=False) == PrefixHit(exact, MIN_PREFIX_TOKENS, MIN_PREFIX_TOKENS)


def test_of_a_sequence_and_its_beginning_the_one_serves_that_shares_more():
    kept: PrefixCache[str] = PrefixCache()
    short, long = entry(), entry(1, 2, 3)
    kept.store(short)
    kept.store(long)
    assert short.is_stored, "a beginning stays beside what begins with it"
    asked = pack([*START, 1, 2, 9])
    assert kept.find("m", asked, cut=True) == PrefixHit(long, MIN_PREFIX_TOKENS + 2, MIN_PREFIX_TOKENS + 2)
    assert kept.find("m", asked, cut=False) == PrefixHit(short, MIN_PREFIX_TOKENS, MIN_PREFIX_TOKENS + 2)
    assert not kept.covers("m", pack([*START, 1, 2]), cut=False)
    assert kept.covers("m", pack([*START, 1, 2]), cut=True)
    assert kept.find("m", pack([*START, 9]), cut=True) == PrefixHit(short, MIN_PREFIX_TOKENS, MIN_PREFIX_TOKENS)
    assert kept.pop(long) == "cache of (1, 2, 3)"
    assert kept.find("m", asked, cut=True) == PrefixHit(short, MIN_PREFIX_TOKENS, MIN_PREFIX_TOKENS)


def test_the_state_counts_hits_stores_and_evictions_and_names_the_newest():
    kept: PrefixCache[str] = PrefixCache()
    entries = [entry(number, nbytes=10 + number) for number in range(MAX_EVICTIONS_REPORTED + 2)]
    for one in entries:
        kept.store(one)
    kept.count_hit("m", 30)
    kept.count_hit("m", 12)
    total = sum(one.nbytes for one in entries)
    assert kept.get_state() == CacheState(total, MAX_EVICTIONS_REPORTED + 2, 2, 42, MAX_EVICTIONS_REPORTED + 2, 0, ())
    assert (kept.evict(0), kept.evict(10)) == (0, 10)
    kept.store(replace(entries[1], value="newer", nbytes=5))
    assert (kept.nbytes, len(kept), entries[1].is_stored) == (total - 10 - 11 + 5, MAX_EVICTIONS_REPORTED + 1, False)
    kept.evict_model("m")
    hashes = [one.prompt_hash for one in (*entries[2:], entries[1])]
    assert kept.get_state() == CacheState(
        0, 0, 2, 42, MAX_EVICTIONS_REPORTED + 3, MAX_EVICTIONS_REPORTED + 2, tuple(hashes[-MAX_EVICTIONS_REPORTED:])
    )


def test_an_eviction_without_a_hash_names_no_prompt_and_does_not_count():
    kept: PrefixCache[str] = PrefixCache()
    kept.store(replace(entry(1), prompt_hash=b""))
    assert kept.evict(1) == 10
    kept.count_eviction(b"")
    assert (kept.get_state().evictions, kept.get_state().evicted) == (0, ())


def test_a_prompt_counts_as_evicted_with_the_last_of_its_entries():
    kept: PrefixCache[str] = PrefixCache()
    prompt = entry(1, 2, 3)
    snapshot, copied = (replace(entry(*ids, snapshot=True), prompt_hash=prompt.prompt_hash) for ids in [(1,), (1, 2)])
    for one in (snapshot, copied, prompt):
        kept.store(one)
    copied.set_copy(copy := DiskCopy(prompt.prompt_hash))
    kept.evict_entry(snapshot)
    kept.evict_entry(copied)
    kept.count_eviction(copy.prompt_hash)  # the disk has lost its copy
    assert (kept.get_state().evictions, copy.in_memory) == (0, False), "the prompt itself is still cached"
    kept.evict_entry(prompt)
    assert (kept.get_state().evictions, kept.get_state().evicted) == (1, (prompt.prompt_hash,))


def test_snapshots_are_taken_behind_the_last_turn_and_where_prompts_part():
    prompt = [5] * 40 + [2, 7] + [5] * 100 + [2, 8, 9, 9]
    assert choose_snapshot_positions(prompt, {2}, 0, 0) == [143]
    assert choose_snapshot_positions(prompt, {2}, 0, 80) == [80, 143]
    assert choose_snapshot_positions(prompt, {2}, 50, 80) == [143], (
        "a position just after the cached part saves too little"
    )
    assert choose_snapshot_positions(prompt, {2}, 143, 143) == []
    assert choose_snapshot_positions(prompt, {1}, 0, 0) == [len(prompt) - 1 - MAX_TEMPLATE_TOKENS], (
        "no token ends a turn"
    )
    assert choose_snapshot_positions(prompt, {2}, 0, len(prompt)) == [143, len(prompt) - 1], (
        "one token is left to compute"
    )
    assert choose_snapshot_positions([5] * 10, {2}, 0, 0) == []


def test_how_much_may_be_kept():
    assert compute_limit("auto", 1000, 200) == 120
    assert compute_limit("auto", 1000, 2000) == 0
    assert compute_limit("2KiB", 1000, 200) == 2048
    assert compute_limit("off", 1000, 0) == compute_limit(0, 1000, 0) == compute_limit("0", 1000, 0) == 0
