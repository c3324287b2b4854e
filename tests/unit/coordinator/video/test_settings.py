"""Settings of video jobs."""

import msgspec
import pytest

from coordinator.video.settings import VideoSettings
from wire.units import GIB


@pytest.mark.parametrize("key", ["lease", "keep_bytes"])
@pytest.mark.parametrize("size", ["36 parsecs", "36Gi", "36iB", "36GiBs", "80%", "GiB"])
def test_a_size_with_an_unknown_unit_is_refused(key: str, size: str):
    with pytest.raises(msgspec.ValidationError, match=key):
        msgspec.convert({key: size}, VideoSettings)


@pytest.mark.parametrize("size", ["36GiB", "36 gib", "36864MiB", "38654705664", "38654705664B", "36.0GiB"])
def test_a_size_with_a_known_unit_is_parsed(size: str):
    settings = msgspec.convert({"lease": size, "keep_bytes": size}, VideoSettings)
    assert (settings.lease_bytes, settings.rules.keep_bytes) == (36 * GIB, 36 * GIB)
