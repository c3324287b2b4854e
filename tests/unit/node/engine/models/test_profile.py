"""Stored memory profiles: a file that is unreadable, implausible or of another model is ignored with a log event."""

import shutil
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from node.engine.models.profile import MemoryProfile, MemoryProfileStore, build_key
from wire.report import Hardware, KvParameters, TransientModel
from wire.units import GIB, MIB

KEY, OTHER = (build_key(fingerprint, Hardware("test", 16 * GIB)) for fingerprint in ("one", "other"))
PROFILE = MemoryProfile(KEY, TransientModel(), KvParameters(per_token=1024), MIB, MIB, 256, 1024, 4, 1.0)


@pytest.fixture
def store(tmp_path: Path) -> MemoryProfileStore:
    store = MemoryProfileStore(tmp_path)
    store.write(PROFILE)
    return store


def test_a_profile_is_found_by_its_key_alone(store: MemoryProfileStore):
    with capture_logs() as logs:
        assert store.read(KEY) == PROFILE
        assert store.read(OTHER) is None
        assert MemoryProfileStore(None).read(KEY) is None
    assert logs == []


def test_a_profile_of_another_model_or_with_impossible_numbers_is_ignored(store: MemoryProfileStore, tmp_path: Path):
    shutil.copy(tmp_path / KEY.file, tmp_path / OTHER.file)
    (tmp_path / KEY.file).write_bytes(msgspec.json.encode(replace(PROFILE, residual=-1)))
    with capture_logs() as logs:
        assert store.read(OTHER) is None
        assert store.read(KEY) is None
    assert [entry["event"] for entry in logs] == ["profile of another model"] * 2


@pytest.mark.parametrize("content", [b"{", b'{"key": 1}', None])
def test_a_profile_that_cannot_be_read_is_ignored(store: MemoryProfileStore, tmp_path: Path, content: bytes | None):
    file = tmp_path / KEY.file
    file.unlink()
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content)
    with capture_logs() as logs:
        assert store.read(KEY) is None
    assert [entry["event"] for entry in logs] == ["profile unreadable"]
