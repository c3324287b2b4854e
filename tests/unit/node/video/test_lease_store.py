"""Ledger and folders of leases on the disk of a node."""

import shutil
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest

from node.video.lease_rules import LeaseRecord
from node.video.lease_store import MAX_ENDED_LEASES, MIN_FREE_DISK_BYTES, LeaseStore, hash_artifacts
from node.video.worker.lease_files import GRANT, OUT, SCRATCH
from wire.frames import LeaseEnded
from wire.video import Artifact

CLIP = Artifact("video.mp4", 4, bytes(32))


def end(store: LeaseStore, lease: str) -> LeaseRecord:
    """Store a completed lease with a clip, and return its record."""
    ended = LeaseEnded(lease, 1, "completed", artifacts=(CLIP,))
    record = LeaseRecord(lease=lease, generation=1, job=f"video_{lease}", model="wan", size=1, ended=ended)
    out = store.get_folder(record) / OUT
    out.mkdir(parents=True)
    (out / CLIP.name).write_bytes(b"clip")
    store.end(record)
    return record


def test_a_restarted_agent_keeps_the_clips_that_were_not_fetched(tmp_path: Path):
    store = LeaseStore(tmp_path)
    store.load()
    record = end(store, "l-1")
    (tmp_path / "forgotten.1").mkdir()
    again = LeaseStore(tmp_path)
    again.load()
    assert again.ended == (record,)
    file = again.find_artifact(f"artifact:l-1/{CLIP.name}")
    assert file is not None
    assert file.read_bytes() == b"clip"
    assert not (tmp_path / "forgotten.1").exists()


def test_the_oldest_ended_leases_above_the_limit_are_deleted_with_their_files(tmp_path: Path):
    store = LeaseStore(tmp_path)
    store.load()
    records = [end(store, f"l-{number}") for number in range(MAX_ENDED_LEASES + 2)]
    assert store.ended == tuple(records[2:])
    assert [store.get_folder(record).exists() for record in records[:4]] == [False, False, True, True]
    assert dict(store.ledger.newest)["video_l-0"] == 1, "the generation of a deleted lease stays known"


def hold(store: LeaseStore, lease: str, generation: int = 1) -> LeaseRecord:
    """Store a lease that is held, with a grant, output and scratch files, and return its record."""
    record = LeaseRecord(lease=lease, generation=generation, job=f"video_{lease}", model="wan", size=1)
    folder = store.get_folder(record)
    for name in (OUT, SCRATCH):
        (folder / name).mkdir(parents=True)
        (folder / name / "file").write_bytes(b"x")
    (folder / GRANT).write_bytes(b"{}")
    assert store.put(record)
    return record


@pytest.mark.parametrize(
    "name",
    ["artifact:l-1/other.mp4", "artifact:l-2/video.mp4", "artifact:l-3/video.mp4", "artifact:l-1/../leases.json", ""],
)
def test_only_artifacts_of_ended_leases_are_found(tmp_path: Path, name: str):
    store = LeaseStore(tmp_path)
    store.load()
    end(store, "l-1")
    held = hold(store, "l-2")
    (store.get_folder(held) / OUT / CLIP.name).write_bytes(b"clip")
    assert store.find_artifact("artifact:l-1/video.mp4") == tmp_path / "l-1.1" / OUT / CLIP.name
    assert store.find_artifact(name) is None
    assert store.ended == store.ledger.leases[:1]


def test_an_end_without_artifacts_removes_the_output_and_one_with_them_does_not(tmp_path: Path):
    store = LeaseStore(tmp_path)
    store.load()
    record = hold(store, "l-1")
    store.end(
        LeaseRecord(
            lease="l-1", generation=1, job=record.job, model="wan", size=1, ended=LeaseEnded("l-1", 1, "failed")
        )
    )
    assert not (store.get_folder(record) / OUT).exists()
    assert (store.get_folder(end(store, "l-2")) / OUT / CLIP.name).exists()
    assert [one.lease for one in store.ended] == ["l-1", "l-2"]


def test_a_cleaned_lease_has_neither_grant_nor_scratch_files_and_keeps_its_output(tmp_path: Path):
    store = LeaseStore(tmp_path)
    store.load()
    record = hold(store, "l-1")
    for _ in range(2):
        store.clean(record)
        assert sorted(path.name for path in store.get_folder(record).iterdir()) == [OUT]
    store.drop(record)
    assert (store.ledger.leases, store.get_folder(record).exists()) == ((), True)


def test_a_restart_removes_folders_without_a_lease_and_no_other_file(tmp_path: Path):
    store = LeaseStore(tmp_path)
    store.load()
    first, second = hold(store, "l-1"), hold(store, "l-1", 2)
    store.drop(first)
    (tmp_path / "note").write_text("no folder")
    again = LeaseStore(tmp_path)
    again.load()
    assert again.ledger == store.ledger
    assert again.ledger.holding == second
    assert sorted(path.name for path in tmp_path.iterdir()) == ["l-1.2", "leases.json", "note"]
    (tmp_path / "leases.json").write_text("{")
    again.load()
    assert again.ledger.leases == ()
    assert not (tmp_path / "l-1.2").exists()


def test_a_lease_that_cannot_be_written_is_known_until_a_restart(tmp_path: Path):
    store = LeaseStore(tmp_path / "leases")
    store.load()
    record = hold(store, "l-1")
    shutil.rmtree(tmp_path / "leases")
    (tmp_path / "leases").write_text("no folder")
    assert not store.put(record)
    assert store.ledger.holding == record


@pytest.mark.parametrize(("free", "full"), [(MIN_FREE_DISK_BYTES, False), (MIN_FREE_DISK_BYTES - 1, True)])
def test_a_disk_is_full_below_its_minimum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, full: bool):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    assert LeaseStore(tmp_path).is_full() is full


def test_a_disk_that_cannot_be_read_is_not_full(tmp_path: Path):
    assert not LeaseStore(tmp_path / "gone").is_full()


def test_artifacts_have_size_and_hash_in_their_order(tmp_path: Path):
    (tmp_path / OUT).mkdir()
    files = {"video.mp4": b"clip", "thumbnail.webp": b"small", "secret.txt": b"other"}
    for name, content in files.items():
        (tmp_path / OUT / name).write_bytes(content)
    clip, thumbnail = (
        Artifact(name, len(files[name]), sha256(files[name]).digest()) for name in ("video.mp4", "thumbnail.webp")
    )
    assert hash_artifacts(tmp_path, ["secret.txt", "thumbnail.webp", "video.mp4"]) == (clip, thumbnail)
    assert hash_artifacts(tmp_path, ["video.mp4"]) == (clip,)
    for names in (["thumbnail.webp"], [], None, "video.mp4", {"video.mp4": 1}):
        assert hash_artifacts(tmp_path, names) == ()


@pytest.mark.parametrize("kind", ["empty", "missing", "link"])
def test_a_clip_without_content_is_no_artifact(tmp_path: Path, kind: str):
    (tmp_path / OUT).mkdir()
    file = tmp_path / OUT / "video.mp4"
    (tmp_path / "other").write_bytes(b"a file outside")
    if kind == "empty":
        file.touch()
    elif kind == "link":
        file.symlink_to(tmp_path / "other")
    assert hash_artifacts(tmp_path, ["video.mp4"]) == ()
