"""Names of blocks and states: each part of a name tells two caches apart."""

import pytest

from node.engine.kv.disk import block_chain
from node.engine.kv.disk.block_chain import HASH_BYTES, compute_root, name_state
from node.engine.kv.disk.block_file import FORMAT_VERSION
from node.engine.kv.radix_trie import pack

PARENT = bytes(HASH_BYTES)


def test_a_root_names_the_format_the_model_the_versions_and_the_scope(monkeypatch: pytest.MonkeyPatch):
    root = compute_root("f", "v", "key")
    assert len(root) == HASH_BYTES
    assert root == compute_root("f", "v", "key")
    others = {compute_root(*names) for names in (("g", "v", "key"), ("f", "w", "key"), ("f", "v", "other"))}
    monkeypatch.setattr(block_chain, "FORMAT_VERSION", FORMAT_VERSION + 1)
    assert len({root, *others, compute_root("f", "v", "key")}) == 5


def test_a_state_is_named_by_the_block_before_and_its_tokens():
    name = name_state("m", PARENT, pack([1, 2, 3]))
    assert (name.model, name.parent, name.tokens, len(name.chain)) == ("m", PARENT, 3, HASH_BYTES)
    assert name.file == f"m/{PARENT.hex()}-3-{name.chain.hex()}.s"
    others = {name_state("m", PARENT, pack([1, 2, 4])).chain, name_state("m", b"x" * HASH_BYTES, pack([1, 2, 3])).chain}
    assert len({name.chain, *others}) == 3
