"""Files of the disk cache are read back unchanged, and damaged files are refused."""

import struct
from hashlib import sha256
from random import Random

import msgspec
import numpy as np
import pytest

from node.engine.kv.disk.block_file import (
    DIGEST_BYTES,
    FORMAT_VERSION,
    MAGIC,
    MAX_HEADER_BYTES,
    BlockArray,
    BlockHeader,
    BlockPart,
    InvalidBlockError,
    decode_block,
    encode_block,
)

CHAIN = bytes(range(16))
ARRAYS = [
    BlockArray("float32", np.arange(24, dtype=np.float32).reshape(1, 2, 4, 3)),
    BlockArray("bfloat16", np.arange(8, dtype=np.uint16).reshape(1, 1, 4, 2)),
]


def encoded(arrays: list[BlockArray] = ARRAYS) -> bytes:
    return b"".join(bytes(piece) for piece in encode_block(CHAIN, BlockPart.TOKENS, 4, arrays))


def test_what_was_written_is_read():
    found = decode_block(encoded(), CHAIN, BlockPart.TOKENS, 4)
    assert [one.kind for one in found] == ["float32", "bfloat16"]
    assert all(np.array_equal(one.data, other.data) for one, other in zip(found, ARRAYS, strict=True))


@pytest.mark.parametrize(
    ("chain", "part", "tokens"),
    [(bytes(16), BlockPart.TOKENS, 4), (CHAIN, BlockPart.WINDOW, 4), (CHAIN, BlockPart.TOKENS, 5)],
)
def test_a_file_of_another_place_is_refused(chain: bytes, part: BlockPart, tokens: int):
    with pytest.raises(InvalidBlockError, match="version or place"):
        decode_block(encoded(), chain, part, tokens)


def test_ten_thousand_damaged_files_are_refused_and_nothing_else_is_raised():
    random, whole, refused = Random(5), encoded(), 0
    for _ in range(10_000):
        damaged = bytearray(whole)
        doing = random.randrange(4)
        if doing == 0:
            damaged = damaged[: random.randrange(len(damaged))]
        elif doing == 1:
            damaged += random.randbytes(random.randrange(1, 20))
        elif doing == 2:
            place = random.randrange(len(damaged))
            damaged[place] ^= random.randrange(1, 256)
        else:
            start = random.randrange(len(damaged))
            damaged[start : start + random.randrange(1, 40)] = random.randbytes(random.randrange(40))
        if bytes(damaged) == whole:
            continue
        try:
            decode_block(bytes(damaged), CHAIN, BlockPart.TOKENS, 4)
        except InvalidBlockError:
            refused += 1
        else:
            pytest.fail(f"a damaged file was read: {damaged.hex()}")
    assert refused > 9900


@pytest.mark.parametrize(("kind", "shape"), [("float64", (1, 2)), ("os.system", (1, 2))])
def test_a_type_or_shape_that_is_none_is_refused(kind: str, shape: tuple[int, ...]):
    with pytest.raises(InvalidBlockError):
        decode_block(encoded([BlockArray(kind, np.zeros(shape, np.float32))]), CHAIN, BlockPart.TOKENS, 4)


@pytest.mark.parametrize(
    ("header", "reason"),
    [(b"\xc1", "header cannot be decoded"), (b"\xc1" * (MAX_HEADER_BYTES + 1), "header is damaged")],
)
def test_decode_block_refuses_a_header_with_a_right_digest(header: bytes, reason: str):
    digest = sha256(header).digest()[:DIGEST_BYTES]
    with pytest.raises(InvalidBlockError, match=reason):
        decode_block(MAGIC + struct.pack("<I", len(header)) + header + digest, CHAIN, BlockPart.TOKENS, 4)


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        ([(1, 7)], "too short"),
        ([(1, 2), (1, 5)], "too short"),
        ([(1, 5)], "too long"),
        ([], "too long"),
        ([(1, 6), (0, 2)], "an array of"),
        ([(1, 6)], ""),
    ],
)
def test_a_body_has_exactly_the_arrays_of_its_header(shapes: list[tuple[int, ...]], reason: str):
    body = np.arange(6, dtype=np.float32).tobytes()
    arrays = [("float32", list(shape)) for shape in shapes]
    header = msgspec.msgpack.encode(BlockHeader(FORMAT_VERSION, CHAIN, BlockPart.TOKENS.value, 4, arrays))
    digests = [sha256(part).digest()[:DIGEST_BYTES] for part in (header, body)]
    content = MAGIC + struct.pack("<I", len(header)) + header + digests[0] + body + digests[1]
    if reason:
        with pytest.raises(InvalidBlockError, match=reason):
            decode_block(content, CHAIN, BlockPart.TOKENS, 4)
    else:
        assert decode_block(content, CHAIN, BlockPart.TOKENS, 4)[0].data.tolist() == [[0, 1, 2, 3, 4, 5]]
