"""Ledger and folders of leases on the disk of a node."""

from pathlib import Path

from node.video.lease_store import MAX_ENDED_LEASES, LeaseStore
from node.video.leases import LeaseRecord
from node.video.worker.lease_files import OUT
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
