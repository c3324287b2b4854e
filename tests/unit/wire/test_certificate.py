import pytest

from wire.certificate import read_certificate
from wire.identity import compute_commitment, compute_short_code


def test_read_certificate_raises_value_error_for_other_bytes() -> None:
    for junk in (b"", b"junk", b"\x30\x03\x02\x01\x01"):
        with pytest.raises(ValueError):
            read_certificate(junk)


def test_a_commitment_binds_nonce_and_request() -> None:
    whole = compute_commitment(b"n" * 16, b"csr")
    assert whole not in (
        compute_commitment(b"m" * 16, b"csr"),
        compute_commitment(b"n" * 16, b"other"),
        compute_commitment(b"", b"csr"),
    )


def test_compute_short_code_depends_on_all_four_parts() -> None:
    parts = [b"ca", b"csr", b"node nonce", b"coordinator nonce"]
    code = compute_short_code(*parts)
    assert len(code) == 6
    assert code.isdigit()
    for index in range(4):
        changed = [part + b"x" if index == place else part for place, part in enumerate(parts)]
        assert compute_short_code(*changed) != code
