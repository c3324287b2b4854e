import pytest

from wire.certificate import read_certificate


def test_what_is_no_certificate_is_a_value_error() -> None:
    for junk in (b"", b"junk", b"\x30\x03\x02\x01\x01"):
        with pytest.raises(ValueError):
            read_certificate(junk)
