import pytest

from wire.certificate import read_certificate


def test_read_certificate_raises_value_error_for_other_bytes() -> None:
    for junk in (b"", b"junk", b"\x30\x03\x02\x01\x01"):
        with pytest.raises(ValueError):
            read_certificate(junk)
