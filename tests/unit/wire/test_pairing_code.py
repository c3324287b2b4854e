"""Six digits of a join without a token, and the commitment behind them."""

import os

from hypothesis import given
from hypothesis import strategies as st

from wire.pairing_code import compute_commitment, compute_short_code


@given(st.lists(st.binary(max_size=40), min_size=4, max_size=4), st.integers(0, 3))
def test_compute_short_code_changes_with_every_part_and_has_six_digits(parts: list[bytes], index: int) -> None:
    code = compute_short_code(*parts)
    assert len(code) == 6
    assert code.isdecimal()
    codes = {
        compute_short_code(*[part + os.urandom(8) if i == index else part for i, part in enumerate(parts)])
        for _ in range(5)
    }
    assert len(codes | {code}) >= 4


def test_compute_short_code_is_the_same_in_every_version() -> None:
    assert compute_short_code(b"authority", b"request", b"one", b"two") == "844513"


def test_compute_commitment_binds_nonce_and_request() -> None:
    whole = compute_commitment(b"n" * 16, b"csr")
    assert whole not in (
        compute_commitment(b"m" * 16, b"csr"),
        compute_commitment(b"n" * 16, b"other"),
        compute_commitment(b"", b"csr"),
    )
