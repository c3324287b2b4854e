"""Names of blocks: a chain of hashes from the model and the scope over blocks of 256 tokens. Pure.

    root = blake2b(format, fingerprint of the model, versions, scope),  hₙ = blake2b(hₙ₋₁ ‖ tokens of block n)

A hash therefore identifies all tokens up to the end of its block, for one model and one scope. A state
(`BlockPart.STATE`) can follow any number of tokens. Its name has the hash of the last whole block and the number of
further tokens. The states of a prompt can therefore be looked up by name.
"""

import re
from hashlib import blake2b
from typing import NamedTuple

from node.engine.kv.disk.block_file import FORMAT_VERSION, BlockPart
from node.engine.kv.prefix_store import BLOCK_TOKENS
from node.engine.kv.radix_trie import ID_BYTES

BLOCK_BYTES = BLOCK_TOKENS * ID_BYTES
"""Bytes of the packed ids of a block."""
HASH_BYTES = 16
"""Bytes of a hash of a chain."""
_PARTS = {part.value: part for part in BlockPart}
WHOLE_BLOCK = re.compile(rf"[0-9a-f]{{{2 * HASH_BYTES}}}\.[{BlockPart.TOKENS}{BlockPart.WINDOW}]")
"""Pattern of the names of the parts of whole blocks, without the folder. `parse_name` takes several times as long."""


class BlockName(NamedTuple):
    """Name of a file of the disk cache."""

    model: str
    """Fingerprint of the model, which names the folder of the file."""
    part: BlockPart
    chain: bytes
    """Hash after the last token of the part."""
    tokens: int = BLOCK_TOKENS
    """Number of tokens of the block; for a state, the number of tokens after the last whole block."""
    parent: bytes = b""
    """Hash after the last whole block, for a state only; empty for any other part."""

    @property
    def file(self) -> str:
        """Path of the file relative to the folder of the disk cache: the folder of its model, and its name."""
        stem = self.chain.hex()
        if self.part is BlockPart.STATE:
            stem = f"{self.parent.hex()}-{self.tokens}-{stem}"
        return f"{self.model}/{stem}.{self.part.value}"


def compute_root(fingerprint: str, versions: str, scope: str) -> bytes:
    """Return the first hash of all chains of a model and a scope. `fingerprint` is that of the model. `versions` names
    the libraries that write the arrays, with their versions."""
    text = "\0".join((str(FORMAT_VERSION), fingerprint, versions, scope))
    return blake2b(text.encode(), digest_size=HASH_BYTES).digest()


def compute_chain(root: bytes, key: bytes) -> list[bytes]:
    """Return the chain of hashes of the packed ids `key`: the root, then the hash after each whole block."""
    chain = [root]
    for start in range(0, len(key) - BLOCK_BYTES + 1, BLOCK_BYTES):
        chain.append(blake2b(chain[-1] + key[start : start + BLOCK_BYTES], digest_size=HASH_BYTES).digest())
    return chain


def name_state(model: str, parent: bytes, tail: bytes) -> BlockName:
    """Return the name of the state after the packed ids `tail`, which follow the block with the hash `parent`. `model`
    is the fingerprint of the model."""
    chain = blake2b(b"state" + parent + tail, digest_size=HASH_BYTES).digest()
    return BlockName(model, BlockPart.STATE, chain, len(tail) // ID_BYTES, parent)


def parse_name(file: str) -> BlockName | None:
    """Parse the path of a file relative to the folder of the disk cache (`BlockName.file`). Return None for a file that
    the disk cache did not write."""
    model, _, last = file.rpartition("/")
    stem, _, suffix = last.rpartition(".")
    try:
        if suffix == BlockPart.STATE.value:
            parent, tokens, chain = stem.split("-")
            name = BlockName(model, BlockPart.STATE, bytes.fromhex(chain), int(tokens), bytes.fromhex(parent))
        else:
            name = BlockName(model, _PARTS[suffix], bytes.fromhex(stem))
    except (KeyError, ValueError):
        return None
    return name if model and name.file == file else None
