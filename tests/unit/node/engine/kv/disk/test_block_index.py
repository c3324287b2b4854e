"""The index of the disk cache: names, order of use, evictions and lookups."""

import contextlib
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.engine.kv.disk.block_chain import WHOLE_BLOCK, BlockName, compute_chain, compute_root, name_state, parse_name
from node.engine.kv.disk.block_file import BlockPart
from node.engine.kv.disk.block_index import MAX_EVICTIONS_PER_SAVE, TEMPORARY, BlockIndex, FolderSize
from node.engine.kv.prefix_store import BLOCK_TOKENS
from node.engine.kv.radix_trie import pack

IDS = list(range(3 * BLOCK_TOKENS + 40))
ROOT = compute_root("f", "v", "key")
CHAIN = compute_chain(ROOT, pack(IDS))


def block(number: int) -> BlockName:
    return BlockName("m", BlockPart.TOKENS, bytes([number % 256, number // 256]) + bytes(14))


def test_a_chain_names_the_model_the_scope_and_all_tokens_before():
    assert len(CHAIN) == 4
    others = [compute_root(*one) for one in (("g", "v", "key"), ("f", "w", "key"), ("f", "v", "other"))]
    assert len({ROOT, *others}) == 4
    changed = compute_chain(ROOT, pack([IDS[0] + 1, *IDS[1:]]))
    assert not set(changed[1:]) & set(CHAIN[1:])
    assert compute_chain(ROOT, pack(IDS[: 2 * BLOCK_TOKENS])) == CHAIN[:3]


@given(st.binary(min_size=16, max_size=16), st.binary(max_size=1023), st.sampled_from(BlockPart))
def test_a_name_is_read_back(chain: bytes, tail: bytes, part: BlockPart):
    name = name_state("m", chain, tail) if part is BlockPart.STATE else BlockName("m", part, chain)
    assert parse_name(name.file) == name
    assert bool(WHOLE_BLOCK.fullmatch(name.file.removeprefix("m/"))) is (part is not BlockPart.STATE)


def test_other_files_have_no_name():
    for file in ("", "lock", "x.t", f"{'0' * 31}.t", "..t", f"{'0' * 32}.q", f"{'0' * 32}-+1-{'0' * 32}.s"):
        assert parse_name(file) is None or parse_name(file).file == file  # type: ignore[union-attr]
    assert parse_name("identity") is None


@pytest.mark.parametrize(
    "file",
    [f"{'0' * 32}.t", f"m/{'A' * 32}.t", f"m/{'0 ' * 16}.t", f"m/{'0' * 32}-+1-{'0' * 32}.s", f"m/{'0' * 32}-1.s"],
)
def test_a_file_has_a_name_only_as_it_is_written(file: str):
    assert parse_name(file) is None


def test_a_file_that_is_written_again_replaces_its_size_and_an_unknown_one_is_not_removed():
    index, name, other = BlockIndex(), block(1), block(2)
    index.add(name, 10)
    index.add(other, 1)
    index.add(name, 25)
    assert (index.nbytes, len(index), index.list_models()) == (26, 2, {"m": FolderSize(2, 26)})
    assert [index.get_size(one) for one in (name, other, block(3))] == [25, 1, 0]
    assert index.choose_evictions(0, 25) == [other.file], "it is the most recently used one"
    assert [index.remove(file) for file in (name.file, name.file, "m/unknown")] == [True, False, False]
    assert (list(index.removed), index.list_models()) == ([name.file], {"m": FolderSize(1, 1)})
    index.remove(other.file)
    assert (index.nbytes, index.list_models()) == (0, {})


def test_files_are_listed_by_their_model():
    index = BlockIndex()
    names = [BlockName(model, BlockPart.TOKENS, CHAIN[1]) for model in ("m", "m2", "n")]
    for name in names:
        index.add(name, 1)
    assert [index.list_files(name.model) for name in names] == [[name.file] for name in names]
    index.mark_used([block(9).file, names[0].file])
    assert index.choose_evictions(0, 0)[-1] == names[0].file, "a file that is gone is ignored"


def test_a_removed_state_is_not_found_and_another_of_the_same_length_is():
    index, key = BlockIndex(), pack(IDS[: BLOCK_TOKENS + 9])
    tails = [pack([*IDS[BLOCK_TOKENS : BLOCK_TOKENS + 8], last]) for last in (IDS[BLOCK_TOKENS + 8], 7)]
    names = [name_state("m", CHAIN[1], tail) for tail in tails]
    for name in names:
        index.add(name, 1)
    index.remove(names[1].file)
    assert index.find_state("m", CHAIN, key, len(IDS)) == (BLOCK_TOKENS + 9, names[0])
    index.remove(names[0].file)
    assert index.find_state("m", CHAIN, key, len(IDS)) is None


def test_blocks_are_found_from_the_first_on():
    index = BlockIndex()
    for link in (CHAIN[1], CHAIN[3]):
        index.add(BlockName("m", BlockPart.TOKENS, link), 10)
    assert index.count_blocks("m", CHAIN) == 1
    index.add(BlockName("m", BlockPart.TOKENS, CHAIN[2]), 10)
    assert index.count_blocks("m", CHAIN) == 3
    index.remove(BlockName("m", BlockPart.TOKENS, CHAIN[1]).file)
    assert (index.count_blocks("m", CHAIN), index.nbytes) == (0, 20)


def test_the_longest_state_of_the_same_tokens_is_found():
    index, key = BlockIndex(), pack(IDS)
    for length in (300, 2 * BLOCK_TOKENS, 3 * BLOCK_TOKENS + 20):
        whole = length // BLOCK_TOKENS
        index.add(name_state("m", CHAIN[whole], key[whole * BLOCK_TOKENS * 4 : length * 4]), 1)
    found = [index.find_state("m", CHAIN, key, most) for most in (len(IDS), 700, 400, 299)]
    assert [None if one is None else one[0] for one in found] == [3 * BLOCK_TOKENS + 20, 512, 300, None]
    other = pack([*IDS[: 3 * BLOCK_TOKENS], 9, *IDS[3 * BLOCK_TOKENS :]])
    assert index.find_state("m", CHAIN, other, len(IDS))[0] == 512  # type: ignore[index]
    assert index.find_state("m", CHAIN[:2], key, len(IDS))[0] == 300, "not behind a missing block"  # type: ignore[index]


def test_at_most_32_files_go_for_a_new_one_and_the_quota_is_reached_again():
    index, rounds = BlockIndex(), 0
    for number in range(100):
        index.add(block(number), 10)
    while chosen := index.choose_evictions(10, 200):
        assert len(chosen) <= MAX_EVICTIONS_PER_SAVE
        for file in chosen:
            index.remove(file)
        rounds += 1
    assert (index.nbytes, rounds) == (190, 3)
    assert block(99) in index
    assert block(0) not in index


def test_the_first_block_of_a_used_prompt_is_evicted_last():
    index = BlockIndex()
    for number in range(4):
        index.add(block(number), 10)
    index.mark_used([block(0).file, block(1).file])
    assert index.choose_evictions(0, 0) == [block(number).file for number in (2, 3, 1, 0)]


def test_a_folder_is_read_by_its_names_in_order_of_use(tmp_path: Path):
    (tmp_path / "m").mkdir()
    for number, age in ((1, 5), (2, 50), (3, 20)):
        path = tmp_path / block(number).file
        path.write_bytes(b"x" * number)
        os.utime(path, (time.time() - age, time.time() - age))
    (tmp_path / "identity").write_text("other")
    (tmp_path / "m" / f"{'0' * 31}g.t").write_bytes(b"no name of a block")
    (tmp_path / "n").mkdir()
    state = name_state("n", ROOT, pack([1, 2]))
    (tmp_path / state.file).write_bytes(b"xxxx")
    os.utime(tmp_path / state.file, (time.time() - 1, time.time() - 1))
    unfinished = tmp_path / (block(4).file + TEMPORARY)
    unfinished_identity = tmp_path / f"identity.1{TEMPORARY}"
    for path in (unfinished, unfinished_identity):
        path.write_bytes(b"x")
    index = BlockIndex()
    index.scan(tmp_path, clean=False)
    assert unfinished.exists(), "another process may be writing it"
    assert unfinished_identity.exists()
    assert (len(index), index.nbytes) == (4, 10)
    assert index.list_models() == {"m": FolderSize(3, 6), "n": FolderSize(1, 4)}
    assert index.find_state("n", [ROOT], pack([1, 2, 3]), 2) == (2, state)
    assert index.choose_evictions(0, 0) == [*(block(number).file for number in (2, 3, 1)), state.file]
    index.scan(tmp_path, clean=True)  # as soon as no other process writes
    assert not unfinished.exists()
    assert not unfinished_identity.exists()
    assert (tmp_path / "identity").read_text() == "other"
    assert (len(index), index.nbytes) == (4, 10)
    assert index.list_models() == {"m": FolderSize(3, 6), "n": FolderSize(1, 4)}


def test_files_that_another_process_deletes_while_the_folder_is_read_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    kept, evicted, cleared = block(1), block(2), BlockName("n", BlockPart.TOKENS, bytes(16))
    unfinished = tmp_path / (block(3).file + TEMPORARY)
    paths = [tmp_path / name.file for name in (kept, evicted, cleared)]
    for path in (*paths, unfinished):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    list_folder = os.scandir

    def list_and_delete(path: int | Path) -> contextlib.nullcontext[list[os.DirEntry[str]]]:
        with list_folder(path) as entries:
            listed = list(entries)
        if path == tmp_path:  # the other process clears a model
            paths[2].unlink()
            paths[2].parent.rmdir()
        else:  # the other process evicts a file, and completes one
            paths[1].unlink()
            unfinished.unlink()
        return contextlib.nullcontext(listed)

    monkeypatch.setattr(os, "scandir", list_and_delete)
    index = BlockIndex()
    index.scan(tmp_path, clean=True)
    assert (len(index), index.nbytes, index.list_models()) == (1, 1, {"m": FolderSize(1, 1)})
    assert kept in index


@pytest.mark.parametrize("order", [range(20), range(19, -1, -1)], ids=["as named", "reversed"])
def test_the_least_recently_used_files_are_evicted_first_after_a_restart(tmp_path: Path, order: range):
    (tmp_path / "m").mkdir()
    for age, number in enumerate(order):
        path = tmp_path / block(number).file
        path.write_bytes(b"x")
        os.utime(path, (1e9 - age, 1e9 - age))
    index = BlockIndex()
    index.scan(tmp_path, clean=False)
    assert index.choose_evictions(0, 0) == [block(number).file for number in reversed(order)]


def test_a_chain_of_60000_tokens_is_looked_up_in_a_few_milliseconds():
    key, index = pack(range(60_000)), BlockIndex()
    for link in compute_chain(ROOT, key):
        index.add(BlockName("m", BlockPart.TOKENS, link), 1)
    began = time.process_time()
    for _ in range(10):
        assert index.count_blocks("m", compute_chain(ROOT, key)) == 234
    assert (time.process_time() - began) / 10 < 0.01
