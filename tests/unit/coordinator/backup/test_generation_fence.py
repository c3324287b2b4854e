"""The fence between two coordinators of a cluster: which proofs count, and the record in the state folder."""

import stat
import time
from pathlib import Path

import pytest

from coordinator.backup.generation_fence import (
    MARK_FILE,
    GenerationFence,
    SupersededError,
    SupersededMark,
    record_superseded,
)
from coordinator.tls.cluster_ca import ClusterCa


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> ClusterCa:
    return ClusterCa(tmp_path_factory.mktemp("authority"), time.time)


def test_only_a_higher_generation_with_its_own_seal_of_this_cluster_is_newer(authority: ClusterCa, tmp_path: Path):
    fence, stranger = GenerationFence(authority, 3), ClusterCa(tmp_path, time.time)
    assert fence.is_newer(4, authority.seal_generation(4))
    for generation, seal in (
        (3, authority.seal_generation(3)),
        (2, authority.seal_generation(2)),
        (5, authority.seal_generation(4)),
        (4, stranger.seal_generation(4)),
        (4, b""),
    ):
        assert not fence.is_newer(generation, seal)


def test_a_recorded_proof_keeps_an_older_coordinator_from_starting(authority: ClusterCa, tmp_path: Path):
    fence = GenerationFence(authority, 3)
    fence.check(tmp_path)
    record_superseded(tmp_path, SupersededMark(4, authority.seal_generation(4), "n1", 5.0))
    assert stat.S_IMODE((tmp_path / MARK_FILE).stat().st_mode) == 0o600
    with pytest.raises(SupersededError, match=r"valid now \(reported by node n1\)\. Remove .*cluster restore FILE"):
        fence.check(tmp_path)
    GenerationFence(authority, 4).check(tmp_path)
    record_superseded(tmp_path, SupersededMark(4, authority.seal_generation(4)))
    with pytest.raises(SupersededError, match=f"valid now\\. Remove {tmp_path}"):
        fence.check(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"generation": "x", "seal": ""}', b'{"generation": 9, "seal": "AAAA"}']
)
def test_a_record_without_a_valid_proof_is_ignored(authority: ClusterCa, tmp_path: Path, content: bytes):
    (tmp_path / MARK_FILE).write_bytes(content)
    GenerationFence(authority, 3).check(tmp_path)


def test_a_record_that_cannot_be_read_is_an_error(authority: ClusterCa, tmp_path: Path):
    (tmp_path / MARK_FILE).mkdir()
    with pytest.raises(IsADirectoryError):
        GenerationFence(authority, 3).check(tmp_path)
