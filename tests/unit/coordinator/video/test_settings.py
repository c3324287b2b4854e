"""Settings of video jobs."""

import msgspec
import pytest

from coordinator.video.settings import VideoSettings
from coordinator.video.state.clip_plan import ClipLimits
from coordinator.video.state.job_table import JobRules
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


def test_rules_and_limits_have_the_values_of_the_settings():
    settings = VideoSettings(
        on_node_loss="requeue",
        lease_ack_timeout_seconds=1.0,
        start_timeout_seconds=2.0,
        node_loss_timeout_seconds=3.0,
        queue_timeout_seconds=4.0,
        keep_hours=2.0,
        keep_count=5,
        keep_bytes="1KiB",
        lease="2KiB",
        max_frames=9,
        max_steps=8,
        max_pixels=2048,
    )
    assert settings.rules == JobRules(
        "requeue",
        lease_seconds=1.0,
        start_seconds=2.0,
        away_seconds=3.0,
        headroom_seconds=4.0,
        keep_seconds=7200.0,
        keep_count=5,
        keep_bytes=1024,
    )
    assert (settings.lease_bytes, settings.limits) == (2048, ClipLimits(9, 8, 2048))
    assert VideoSettings().rules == JobRules()
