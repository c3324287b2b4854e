"""The radix trie compared with a list that is searched completely."""

import time
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.engine.kv.radix_trie import RadixTrie, count_common_bytes, pack

ids = st.lists(st.sampled_from([0, 1, 2, 256, 2**32 - 1]), min_size=1, max_size=12)


def shared(one: list[int], other: list[int]) -> int:
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


@given(ids, ids)
def test_common_is_counted_in_whole_ids(one: list[int], other: list[int]):
    assert count_common_bytes(pack(one), pack(other)) == 4 * shared(one, other)


@given(st.lists(ids, max_size=12), st.lists(st.integers(0, 11), max_size=8), ids, st.integers(0, 12))
def test_a_walk_finds_what_a_search_finds(keys: list[list[int]], gone: list[int], asked: list[int], most: int):
    trie: RadixTrie[tuple[int, ...]] = RadixTrie()
    kept = {tuple(key) for key in keys}
    for key in keys:
        trie.put(pack(key), tuple(key))
    for key in {tuple(keys[place]) for place in gone if place < len(keys)}:
        trie.remove(pack(key))
        kept.discard(key)
    match = trie.match(pack(asked), most)
    best = max((shared(asked, list(key)) for key in kept), default=0)
    assert match.shared == best
    if best:
        assert match.below in kept
        assert list(match.below)[:best] == asked[:best]
    else:
        assert match.below is None
    assert trie.empty is (not kept)
    beginnings = {key for key in kept if key == tuple(asked[: len(key)])}
    assert match.exact == max((key for key in beginnings if len(key) <= most), key=len, default=None)
    assert set(trie.find_proper_prefixes(pack(asked))) == {key for key in beginnings if len(key) < len(asked)}


def test_a_start_that_only_leads_to_longer_keys_hides_no_shorter_one():
    trie: RadixTrie[str] = RadixTrie()
    for ids, value in (([1, 2], "short"), ([1, 2, 3, 4], "one"), ([1, 2, 3, 5], "other")):
        trie.put(pack(ids), value)
    match = trie.match(pack([1, 2, 3, 9]), 9)
    assert (match.shared, match.exact) == (3, "short")
    assert match.below in ("one", "other")
    assert trie.match(pack([1, 2, 3, 4]), 3).exact == "short", "the longer one is too long"
    assert trie.find_proper_prefixes(pack([1, 2, 3, 4])) == ["short"]
    trie.remove(pack([1, 2]))
    assert trie.match(pack([1, 2, 3, 9]), 9).exact is None


def test_what_is_not_stored_cannot_be_removed():
    trie: RadixTrie[int] = RadixTrie()
    trie.put(pack([1, 2]), 1)
    with pytest.raises(KeyError):
        trie.remove(pack([2]))


def test_a_prompt_of_six_thousand_tokens_is_looked_up_within_a_millisecond():
    random = Random(1)
    trie: RadixTrie[int] = RadixTrie()
    start = [random.randrange(150_000) for _ in range(3000)]
    prompts = [start + [random.randrange(150_000) for _ in range(3000)] for _ in range(200)]
    for number, prompt in enumerate(prompts):
        trie.put(pack(prompt), number)
    key = tuple(prompts[7])
    figures: list[float] = []
    match = trie.match(pack(key), len(key) - 1)
    for _ in range(20):
        begun = time.perf_counter()
        trie.match(pack(key), len(key) - 1)
        figures.append(time.perf_counter() - begun)
    assert match.shared == 6000
    assert min(figures) <= 0.001


@pytest.mark.parametrize(
    ("most", "exact"), [(0, None), (1, None), (2, "short"), (3, "short"), (4, "long"), (5, "long"), (9, "long")]
)
def test_an_exact_match_has_at_most_the_allowed_length(most: int, exact: str | None):
    trie: RadixTrie[str] = RadixTrie()
    trie.put(pack([1, 2]), "short")
    trie.put(pack([1, 2, 3, 4]), "long")
    assert trie.match(pack([1, 2, 3, 4, 5]), most).exact == exact
