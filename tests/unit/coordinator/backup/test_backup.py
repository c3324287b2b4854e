"""Backups of a real state folder: complete or refused, and restored completely or not at all."""

import asyncio
import errno
import hashlib
import json
import os
import shutil
import sqlite3
import stat
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import pyrage
import pytest

from coordinator.backup import archive, encryption
from coordinator.backup.archive import Manifest, read_manifest
from coordinator.backup.atomic_swap import RESTORING
from coordinator.backup.backup import BackupError, create_backup
from coordinator.backup.encryption import EncryptingWriter
from coordinator.backup.generation_fence import (
    MARK_FILE,
    GenerationFence,
    SupersededError,
    SupersededMark,
    record_superseded,
)
from coordinator.backup.restore import PassphraseNeeded, RestoreError, inspect_backup, restore
from coordinator.models.wishes import Wish
from coordinator.state.database import Database
from coordinator.state.rows import KeyRow, MemberRow, TokenRow
from coordinator.state.schema import MIGRATIONS
from coordinator.state.store_errors import StateLockedError
from coordinator.tls.cluster_ca import ClusterCa, read_cluster_id
from coordinator.video.state.jobs import RequestedClip, VideoJob
from coordinator.video.state.memory_model import VideoMemoryProfile, VideoProfileKey
from coordinator.video.store import MIGRATIONS as VIDEO_MIGRATIONS
from coordinator.video.store import VideoStore
from router.admission.rate_limits import KeyLimits
from router.admission.usage import UsageTotals
from tests.support.coordinator.sync_log import SyncLog
from tests.support.former_backup import in_former_format
from wire.identity import NodeId
from wire.report import Hardware

NOW = 1_800_000_000.0
QUICK_COST = 10
CLIP = b"....ftyp" + bytes(range(256)) * 40
KEY = KeyRow("k1", "laptop", ("infer",), b"d" * 32, 1.0)


def cluster(folder: Path, name: str = "home", *, video: bool = True) -> str:
    """Make a cluster with one object of every kind; return its id."""
    store = Database(folder)
    authority = ClusterCa(folder / "authority", time.time)
    store.create_cluster(authority.cluster, name)
    store.increment_epoch()
    store.members.put(MemberRow(NodeId("n1"), "studio", "m1", Hardware("M4", 1 << 37), "ab12", 5.0))
    store.tokens.put(TokenRow("abcdefgh", b"k" * 32, 1.0, 2.0, 3, "lab"))
    store.keys.put(KEY)
    (folder / "pepper").write_bytes(b"p" * 32)
    (folder / "config.toml").write_text(f'[cluster]\nname = "{name}"\n[http]\ntls_cert_file = "/etc/cert.pem"\n')
    store.close()
    if video:
        videos = VideoStore(folder)
        videos.put_profile(VideoProfileKey("wan", "e", 8), VideoMemoryProfile(2**30, 1.0))
        videos.close()
        clip = folder / "videos" / "video_abc" / "video.mp4"
        clip.parent.mkdir(parents=True)
        clip.write_bytes(CLIP)
        (clip.parent / "thumbnail.webp.part").write_bytes(b"half")
    return authority.cluster


def jobs_of(folder: Path) -> VideoStore:
    found = VideoStore(folder)
    found.close()
    return found


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Derive keys with 1 MiB of memory. `test_encryption.py` uses the real cost."""
    monkeypatch.setattr(encryption, "COST", QUICK_COST)


@pytest.fixture
def home(tmp_path: Path) -> tuple[Path, str]:
    """Return a cluster's state folder and its id."""
    return tmp_path / "home", cluster(tmp_path / "home")


@pytest.fixture
def saved(home: tuple[Path, str], tmp_path: Path) -> Path:
    """Return a backup of the cluster."""
    return create_backup(home[0], tmp_path / "home.backup").file


def shows(folder: Path) -> tuple[str, int, set[str], set[str]]:
    """Open a state folder as the coordinator does; return cluster, generation, members and keys."""
    store = Database(folder)
    try:
        assert ClusterCa(folder / "authority", time.time).cluster == store.meta.cluster
        return store.meta.cluster, store.meta.generation, set(store.members), set(store.keys)
    finally:
        store.close()


@pytest.mark.parametrize("name", ["Mac #2", "50%20 ü", "a?b"])
def test_the_name_of_the_state_folder_may_have_any_characters(tmp_path: Path, name: str) -> None:
    ident = cluster(tmp_path / name)
    assert create_backup(tmp_path / name, tmp_path / "b").manifest.cluster == ident


@pytest.mark.parametrize("passphrase", [None, b"correct horse"])
def test_backup_of_a_store_in_use_can_be_restored_elsewhere(
    home: tuple[Path, str], tmp_path: Path, passphrase: bytes | None
) -> None:
    folder, ident = home
    running = Database(folder)
    running.keys.put(KeyRow("k2", "late", ("infer",), b"e" * 32, 1.0))
    asyncio.run(running.flush())
    made = create_backup(folder, tmp_path / "b", artifacts=True, passphrase=passphrase)
    running.close()
    assert stat.S_IMODE(made.file.stat().st_mode) == 0o600
    assert made.manifest.outside == ("/etc/cert.pem",)
    raw = made.file.read_bytes()
    assert ((b"PRIVATE KEY" in raw) or (b"laptop" in raw)) is (passphrase is None)
    assert inspect_backup(made.file, passphrase) == made.manifest
    other = tmp_path / "elsewhere"
    done = restore(made.file, other, NOW, passphrase=passphrase)
    assert shows(other) == (ident, int(NOW), {"n1"}, {"k1", "k2"})
    assert (done.counts.members, done.counts.keys, done.counts.tokens, done.config) == (1, 2, 1, "config.toml")
    assert (other / "videos/video_abc/video.mp4").read_bytes() == CLIP
    assert not (other / "videos/video_abc/thumbnail.webp.part").exists()
    assert len(jobs_of(other).profiles) == 1
    for path in other.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert not (other / RESTORING).exists()
    assert not list(folder.glob(".backup-*"))


def test_a_backup_deletes_what_killed_backups_left(home: tuple[Path, str], tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    folder, kept = home[0], os.getppid()
    for process in (ended.pid, os.getpid(), kept):
        (folder / f".backup-{process}-abc").mkdir()
        (folder / f".backup-{process}-abc" / "cluster.db").touch()
        (tmp_path / f"b.{process}.new").touch()
        (tmp_path / f"other.{process}.new").touch()
    (tmp_path / "b.999999999.new").mkdir()  # no backup makes such a folder
    create_backup(folder, tmp_path / "b")
    assert [path.name for path in folder.glob(".backup-*")] == [f".backup-{kept}-abc"]
    assert {path.name for path in tmp_path.glob("b.*")} == {f"b.{kept}.new", "b.999999999.new"}
    assert len(list(tmp_path.glob("other.*"))) == 3


def test_generations_only_grow(home: tuple[Path, str], tmp_path: Path) -> None:
    first = create_backup(home[0], tmp_path / "b").file
    restore(first, tmp_path / "two", NOW)
    second = create_backup(tmp_path / "two", tmp_path / "c").file
    restore(second, tmp_path / "three", NOW - 1e6)
    assert shows(tmp_path / "three")[1] == int(NOW) + 1, "also where the clock is behind"
    store = Database(tmp_path / "three")
    assert store.increment_epoch() > 2000, "the other may have been started again and again since"
    store.close()


def test_restore_moves_an_existing_state_aside_only_with_replace(home: tuple[Path, str], tmp_path: Path) -> None:
    saved, other = create_backup(home[0], tmp_path / "b").file, tmp_path / "other"
    stranger = cluster(other, "lab")
    (other / "node").mkdir()
    with pytest.raises(RestoreError, match=rf"another cluster \({stranger}\).*--replace"):
        restore(saved, other, NOW)
    with pytest.raises(
        RestoreError, match=r"this cluster already, last changed at .*; the backup was made at .*revoked"
    ):
        restore(saved, home[0], NOW)
    assert shows(other)[0] == stranger
    done = restore(saved, other, NOW, replace=True)
    assert shows(other)[0] == home[1]
    assert done.aside is not None
    assert {one.name for one in done.aside.iterdir()} >= {"cluster.db", "videos.db", "authority", "pepper", "videos"}
    assert done.config == "config.toml.restored"
    assert 'name = "lab"' in (other / "config.toml").read_text()
    assert 'name = "home"' in (other / "config.toml.restored").read_text()
    assert (other / "node").exists()
    again = restore(saved, home[0], NOW, replace=True)
    assert (home[0] / "videos/video_abc/video.mp4").exists(), "the same cluster's videos stay where they are"
    assert again.config == "config.toml"


def test_a_running_coordinator_is_not_pulled_away(home: tuple[Path, str], saved: Path) -> None:
    running = Database(home[0])
    with pytest.raises(StateLockedError, match="in use by process"):
        restore(saved, home[0], NOW, replace=True)
    running.close()


@pytest.mark.parametrize("passphrase", [None, b"pass"])
def test_a_truncated_or_damaged_backup_changes_nothing(
    home: tuple[Path, str], tmp_path: Path, passphrase: bytes | None
) -> None:
    file, other = create_backup(home[0], tmp_path / "b", passphrase=passphrase).file, tmp_path / "other"
    whole = file.read_bytes()
    cuts = [0, 5, 17, 20, 33, 100, len(whole) // 2, len(whole) - 1]
    flips = [3, 18, 40, 300, len(whole) // 3, len(whole) // 2, len(whole) - 10]
    spoiled = [whole[:cut] for cut in cuts]
    spoiled += [whole[:at] + bytes((whole[at] ^ 1,)) + whole[at + 1 :] for at in flips]
    spoiled += [whole + b"x", whole * 2, b"#!/bin/sh\n", b"macpool backup 2\n" + whole, b"macpool sealed 9\n"]
    for number, content in enumerate(spoiled if passphrase is None else spoiled[3::4]):  # each guess takes time
        file.write_bytes(content)
        with pytest.raises(RestoreError):
            restore(file, other, NOW, passphrase=passphrase)
        if passphrase is None:
            with pytest.raises(RestoreError):
                inspect_backup(file)
        assert {one.name for one in other.iterdir()} <= {"lock"}, number


def test_an_encrypted_file_is_replaced_only_if_the_passphrase_decrypts_it_to_a_backup(
    home: tuple[Path, str], tmp_path: Path
) -> None:
    diary, file = tmp_path / "diary.age", tmp_path / "b"
    with diary.open("wb") as out:
        writer = EncryptingWriter(out, b"p")
        writer.write(b"dear diary")
        writer.finish()
    content = diary.read_bytes()
    for passphrase in (b"p", b"q"):
        with pytest.raises(BackupError, match="exists and is encrypted, and not a backup with this passphrase: choose"):
            create_backup(home[0], diary, passphrase=passphrase)
    with pytest.raises(BackupError, match="is encrypted: choose another name, or --encrypt with its passphrase"):
        create_backup(home[0], diary)
    assert diary.read_bytes() == content
    create_backup(home[0], file, passphrase=b"p")
    first = file.read_bytes()
    create_backup(home[0], file, passphrase=b"p")
    assert file.read_bytes() != first
    with pytest.raises(BackupError, match="is encrypted: choose another name"):
        create_backup(home[0], file)
    file.write_bytes(b"macpool sealed 1\n" + bytes(100))
    assert create_backup(home[0], file).manifest.cluster == home[1]


def test_age_decrypts_a_backup_to_one_that_can_be_restored(home: tuple[Path, str], tmp_path: Path) -> None:
    file = create_backup(home[0], tmp_path / "b", passphrase=b"right").file
    file.write_bytes(pyrage.passphrase.decrypt(file.read_bytes(), "right"))
    assert restore(file, tmp_path / "other", NOW).manifest.cluster == home[1]
    assert shows(tmp_path / "other")[0] == home[1]


def test_a_backup_in_the_former_encrypted_format_is_restored(saved: Path, tmp_path: Path) -> None:
    plain = saved.read_bytes()[len(archive.MAGIC) :]
    saved.write_bytes(in_former_format(plain, b"right", QUICK_COST))
    with pytest.raises(PassphraseNeeded):
        inspect_backup(saved)
    manifest = inspect_backup(saved, b"right")
    assert restore(saved, tmp_path / "other", NOW, passphrase=b"right").manifest == manifest


def test_an_encrypted_file_without_a_backup_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "b"
    for content, words in (
        (b"dear diary", "is not a macpool backup"),
        (b"macpool backup 2\n", "newer macpool: update"),
    ):
        with file.open("wb") as out:
            writer = EncryptingWriter(out, b"p")
            writer.write(content)
            writer.finish()
        with pytest.raises(RestoreError, match=words):
            inspect_backup(file, b"p")


def test_the_passphrase_decides(home: tuple[Path, str], tmp_path: Path) -> None:
    file = create_backup(home[0], tmp_path / "b", passphrase=b"right").file
    with pytest.raises(RestoreError, match="passphrase is wrong"):
        restore(file, tmp_path / "other", NOW, passphrase=b"wrong")
    with pytest.raises(PassphraseNeeded, match="--passphrase-file"):
        restore(file, tmp_path / "other", NOW)


def forged(folder: Path, change: Callable[[dict[str, Any]], None], extra: bytes = b"") -> Path:
    """Make a backup with a changed manifest and a matching digest."""
    source = create_backup(folder, folder.parent / "forged").file
    with source.open("rb") as opened:
        opened.read(len(archive.MAGIC))
        manifest = read_manifest(opened)
        rest = opened.read()
    tree = json.loads(msgspec.json.encode(manifest))
    change(tree)
    source.write_bytes(archive.MAGIC + _head(tree) + rest + extra)
    return source


def _head(tree: dict[str, Any]) -> bytes:
    encoded = msgspec.json.encode(tree)
    return len(encoded).to_bytes(4, "big") + encoded + hashlib.sha256(encoded).digest()


@pytest.mark.parametrize(
    "name",
    [
        "../evil",
        "/etc/passwd",
        "authority/../../evil.pem",
        "videos/video_a/../../../evil.mp4",
        "node/lock",
        "authority/x.pem\n",
        "videos/video_a/.hidden.mp4",
        "cluster.db/",
        "run.json",
        "",
        "lock",
    ],
)
def test_no_name_leads_out_of_the_folder(home: tuple[Path, str], tmp_path: Path, name: str) -> None:
    evil = {"name": name, "size": 4, "sha256": hashlib.sha256(b"evil").hexdigest()}
    file = forged(home[0], lambda tree: tree["members"].append(evil), b"evil")
    with pytest.raises(RestoreError, match="which does not belong in a backup"):
        restore(file, tmp_path / "other", NOW)
    assert not list(tmp_path.glob("**/evil*"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tree: tree.update(format=2), "newer macpool"),
        (lambda tree: tree["schemas"].update({"cluster.db": 99}), "schema 99"),
        (lambda tree: tree.update(cluster="c-other"), "another cluster"),
        (lambda tree: tree["members"].append(tree["members"][0]), "twice"),
        (lambda tree: tree["members"].pop(), "data after its last member"),
        (lambda tree: tree["members"][0].update(size=-1), "twice, or lacks"),
        (lambda tree: tree["members"][0].update(sha256="0" * 64), "is damaged"),
        (lambda tree: tree["members"][0].update(size=2**62), "it is truncated"),
        (lambda tree: tree.pop("epoch"), "cannot be read"),
        (lambda tree: tree.update(members=[]), "lacks"),
    ],
)
def test_a_manifest_that_lies_is_refused(
    home: tuple[Path, str], tmp_path: Path, change: Callable[[dict[str, Any]], None], words: str
) -> None:
    with pytest.raises(RestoreError, match=words):
        restore(forged(home[0], change), tmp_path / "other", NOW)
    assert not (tmp_path / "other" / "cluster.db").exists()


def test_a_database_of_another_cluster_than_its_authority_is_refused(tmp_path: Path) -> None:
    cluster(tmp_path / "one", video=False)
    cluster(tmp_path / "two", video=False)
    shutil.copy(tmp_path / "two/authority/authority.pem", tmp_path / "one/authority/authority.pem")
    with pytest.raises(BackupError, match="another cluster"):
        create_backup(tmp_path / "one", tmp_path / "b")


def test_backup_changes_no_file_although_the_coordinator_certificate_is_due(tmp_path: Path) -> None:
    ClusterCa(tmp_path / "home" / "authority", lambda: time.time() - 61 * 86400)
    own = (tmp_path / "home" / "authority" / "coordinator.pem").read_bytes()
    store = Database(tmp_path / "home")
    store.create_cluster(read_cluster_id(tmp_path / "home" / "authority" / "authority.pem"), "home")
    store.close()
    (tmp_path / "home" / "pepper").write_bytes(b"p" * 32)
    file = create_backup(tmp_path / "home", tmp_path / "b").file
    assert (tmp_path / "home" / "authority" / "coordinator.pem").read_bytes() == own
    restore(file, tmp_path / "other", NOW)
    assert (tmp_path / "other" / "authority" / "coordinator.pem").read_bytes() == own


def test_create_backup_overwrites_only_backups(home: tuple[Path, str], tmp_path: Path) -> None:
    precious = tmp_path / "thesis.txt"
    precious.write_text("all of it")
    link = tmp_path / "link"
    link.symlink_to(precious)
    for target in (precious, link, tmp_path):
        with pytest.raises(BackupError, match=r"is not a backup: choose another name|cannot be written"):
            create_backup(home[0], target)
    assert precious.read_text() == "all of it"
    with pytest.raises(BackupError, match="no cluster"):
        create_backup(tmp_path / "nothing", tmp_path / "b")
    with pytest.raises(BackupError) as caught:
        create_backup(home[0], tmp_path / "missing" / "b")
    assert str(caught.value) == f"no backup was made: {tmp_path / 'missing'}: No such file or directory"
    create_backup(home[0], tmp_path / "b")
    create_backup(home[0], tmp_path / "b")
    assert [one.name for one in tmp_path.iterdir() if ".new" in one.name] == []


# -- the parts ------------------------------------------------------------------------------------------------------


def test_only_a_coordinator_of_the_cluster_can_report_a_newer_generation(
    home: tuple[Path, str], tmp_path: Path
) -> None:
    authority = ClusterCa(home[0] / "authority", time.time)
    stranger = ClusterCa(tmp_path / "stranger", time.time)
    fence = GenerationFence(authority, 5)
    assert fence.is_newer(6, authority.seal_generation(6))
    lies = [
        (6, b""),
        (6, b"x" * 70),
        (6, authority.seal_generation(7)),
        (6, stranger.seal_generation(6)),
        (5, authority.seal_generation(5)),
        (4, authority.seal_generation(4)),
        (2**62, authority.seal_generation(6)),
        (-1, authority.seal_generation(-1)),
    ]
    for generation, seal in lies:
        assert not fence.is_newer(generation, seal)
    fence.check(home[0])
    record_superseded(home[0], SupersededMark(6, authority.seal_generation(6), "studio", NOW))
    assert (home[0] / MARK_FILE).stat().st_mode & 0o777 == 0o600
    with pytest.raises(SupersededError, match=r"is valid now \(reported by node studio\)\. Remove"):
        fence.check(home[0])
    record_superseded(home[0], SupersededMark(6, authority.seal_generation(6)))
    with pytest.raises(SupersededError, match=r"is valid now\. Remove"):
        fence.check(home[0])
    GenerationFence(authority, 6).check(home[0])
    record_superseded(home[0], SupersededMark(9, b"forged"))
    fence.check(home[0])


# -- upgrades -------------------------------------------------------------------------------------------------------


def test_restore_migrates_an_older_schema(tmp_path: Path) -> None:

    home = tmp_path / "home"
    name = cluster(home, video=False)
    for one in home.glob("cluster.db*"):
        one.unlink()
    with sqlite3.connect(home / "cluster.db") as connection:
        connection.executescript(MIGRATIONS[0] + "PRAGMA user_version = 1;")
        connection.execute("UPDATE meta SET cluster = ?, name = 'home', epoch = 7", (name,))
        connection.execute("INSERT INTO members VALUES ('n1', 'studio', 'm1', '[]', '', 1.0, 0, NULL)")
    connection.close()
    saved = create_backup(home, tmp_path / "old.backup").file
    restore(saved, tmp_path / "new", NOW)
    found, generation, members, _ = shows(tmp_path / "new")
    assert (found, members) == (name, {"n1"})
    assert generation == int(NOW), "a restore counts one in a schema that had none"


# -- all tables and files --------------------------------------------------------------------------------------------


def full_cluster(folder: Path) -> str:
    """Make a cluster with rows in every table, among them revoked, removed and spent ones; return its id."""
    ident = cluster(folder)
    store = Database(folder)
    store.members.put(
        MemberRow(
            NodeId("n2"),
            "mini",
            "m2",
            Hardware("M2", 1 << 34),
            "cd34",
            6.0,
            cordoned=True,
            labels=("lab", "fast"),
            video=True,
        )
    )
    store.members.put(MemberRow(NodeId("n3"), "gone", "m3", Hardware(), "ef56", 7.0, removed=8.0))
    store.tokens.put(TokenRow("spent", b"s" * 32, 1.0, 2.0, 0, "spent", revoked=True))
    store.keys.put(KeyRow("k2", "bounded", ("infer", "admin"), b"e" * 32, 2.0, 3.0, KeyLimits(concurrency=2)))
    store.keys.put(KeyRow("k3", "revoked", ("infer",), b"f" * 32, 2.0))
    store.keys.revoke("k3", 9.0)
    store.wishes.put(Wish("publisher/tiny", 2, ("lab",), (NodeId("n2"),), idle_unload_seconds=60.0, eviction_cost=7))
    store.deny_list.add_node(NodeId("n3"), 8.0, "removed")
    store.deny_list.add_serial("ef56", 8.0, "removed")
    store.usage.add("k1", "tiny", "2026-01-01", UsageTotals(1, 2, 3, 4, 5))
    store.audit.add(7.0, "k1", "cordon", "n2", "10.0.0.5")
    store.close()
    videos = VideoStore(folder)
    videos.put_job(VideoJob("video_abc", 1, "k1", 100.0, RequestedClip("m", "p", 64, 48, 16, 8, 4, 12), 36))
    videos.put_job(VideoJob("video_def", 2, "k1", 101.0, RequestedClip("m", "q", 64, 48, 16, 8, 4, 12), 36))
    videos.close()
    return ident


def tables(file: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Read every table of a database, with its schema's version."""
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as connection:
        names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name").fetchall()
        found = {name: connection.execute(f"SELECT * FROM {name} ORDER BY 1, 2").fetchall() for (name,) in names}
        return found | {"user_version": connection.execute("PRAGMA user_version").fetchall()}


def test_backup_restores_every_row_of_every_table(tmp_path: Path) -> None:
    full_cluster(tmp_path / "home")
    before = {name: tables(tmp_path / "home" / name) for name in ("cluster.db", "videos.db")}
    empty = [(file, name) for file, found in before.items() for name, rows in found.items() if not rows]
    assert empty == [], "a table without rows shows nothing: add some in full_cluster"
    done = restore(create_backup(tmp_path / "home", tmp_path / "b").file, tmp_path / "other", NOW)
    after = {name: tables(tmp_path / "other" / name) for name in before}
    ((one, ident, name, epoch, generation),) = before["cluster.db"].pop("meta")
    assert after["cluster.db"].pop("meta") == [(one, ident, name, epoch + 1000, int(NOW))]
    assert generation == 0
    assert after == before
    assert (done.counts.members, done.counts.keys, done.counts.tokens, done.counts.jobs) == (2, 2, 1, 2)


def test_restore_keeps_administrative_settings(tmp_path: Path) -> None:
    full_cluster(tmp_path / "home")
    restore(create_backup(tmp_path / "home", tmp_path / "b").file, tmp_path / "other", NOW)
    store = Database(tmp_path / "other")
    member = store.members[NodeId("n2")]
    assert (member.cordoned, member.labels, member.video, member.hardware) == (
        True,
        ("lab", "fast"),
        True,
        Hardware("M2", 1 << 34),
    )
    assert set(store.keys) == {"k1", "k2"}, "a revoked key stays revoked"
    assert store.keys["k2"].limits == KeyLimits(concurrency=2)
    assert store.deny_list.is_denied(NodeId("n3"), "")
    assert store.deny_list.is_denied(NodeId("other"), "ef56")
    assert [(row.key, row.used) for row in store.usage.list_rows()] == [("k1", UsageTotals(1, 2, 3, 4, 5))]
    assert [(row.action, row.address) for row in store.audit] == [("cordon", "10.0.0.5")]
    store.close()
    jobs = jobs_of(tmp_path / "other")
    assert [job.id for job in jobs.jobs] == ["video_abc", "video_def"]
    assert jobs.profiles == {VideoProfileKey("wan", "e", 8): VideoMemoryProfile(2**30, 1.0)}


def files_of(folder: Path) -> dict[str, bytes]:
    """Read every file except databases, locks and temporary files."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: data for name, data in found.items() if ".db" not in name and not name.endswith((".part", "lock"))}


@pytest.mark.parametrize("artifacts", [True, False])
def test_backup_restores_every_file_byte_by_byte(home: tuple[Path, str], tmp_path: Path, artifacts: bool) -> None:
    for name in ("endpoint", "endpoint-authority"):
        (home[0] / "authority" / f"{name}.pem").write_bytes(name.encode())
    poster = home[0] / "videos" / "video_abc" / "poster.webp"
    poster.write_bytes(b"picture")
    before = files_of(home[0])
    assert {"pepper", "config.toml", "authority/authority.pem", "authority/coordinator.pem"} <= set(before)
    made = create_backup(home[0], tmp_path / "b", artifacts=artifacts)
    restore(made.file, tmp_path / "other", NOW)
    if not artifacts:
        before = {name: data for name, data in before.items() if not name.startswith("videos/")}
    assert files_of(tmp_path / "other") == before
    assert made.manifest.artifacts is artifacts
    assert {one.name for one in made.manifest.members} == {"cluster.db", "videos.db", *before}


def test_manifest_describes_the_backup(home: tuple[Path, str], tmp_path: Path) -> None:
    (home[0] / "config.toml").write_text('[http]\ntls_cert_file = "/etc/cert.pem"\ntls_key_file = "/etc/key.pem"\n')
    began = time.time()
    made = create_backup(home[0], tmp_path / "b")
    manifest = made.manifest
    assert (manifest.cluster, manifest.name, manifest.epoch, manifest.generation) == (home[1], "home", 1, 0)
    assert (manifest.format, manifest.macpool) == (1, version("macpool"))
    assert manifest.schemas == {"cluster.db": len(MIGRATIONS), "videos.db": len(VIDEO_MIGRATIONS)}
    assert manifest.outside == ("/etc/cert.pem", "/etc/key.pem")
    assert began - 1 <= manifest.made <= time.time()
    assert (made.size, made.encrypted) == (made.file.stat().st_size, False)
    assert create_backup(home[0], tmp_path / "c", passphrase=b"p").encrypted
    for member in manifest.members:
        assert member.size > 0
    second = back_up_of_restored(made.file, tmp_path / "two")
    assert (second.epoch, second.generation) == (1001, int(NOW)), "a backup of a restored cluster"


def back_up_of_restored(file: Path, folder: Path) -> Manifest:
    restore(file, folder, NOW)
    return create_backup(folder, folder.parent / "again").manifest


def test_a_restore_leaves_nothing_of_the_former_databases_and_no_mark(home: tuple[Path, str], tmp_path: Path) -> None:
    saved, other = create_backup(home[0], tmp_path / "b").file, tmp_path / "other"
    cluster(other, "lab")
    for name in ("cluster.db-wal", "cluster.db-shm", "videos.db-wal", MARK_FILE):
        (other / name).write_bytes(b"of the former state")
    done = restore(saved, other, NOW, replace=True)
    assert done.aside is not None
    for name in ("cluster.db-wal", "cluster.db-shm", "videos.db-wal", MARK_FILE):
        assert not (other / name).exists()
        assert (done.aside / name).exists()
    assert not (other / "videos").exists(), "files of another cluster's videos do not stay"
    assert shows(other)[0] == home[1]
    assert done.aside.name == f"replaced-{time.strftime('%Y%m%d-%H%M%S', time.localtime(NOW))}"
    again = restore(saved, other, NOW, replace=True)
    assert again.aside == done.aside.with_name(done.aside.name + "-1"), "an older one is never written over"


def test_a_backup_without_videos_takes_those_of_the_former_state_away(tmp_path: Path) -> None:
    cluster(tmp_path / "plain", video=False)
    saved = create_backup(tmp_path / "plain", tmp_path / "b").file
    assert inspect_backup(saved).schemas == {"cluster.db": len(MIGRATIONS)}
    cluster(tmp_path / "other", "lab")
    restore(saved, tmp_path / "other", NOW, replace=True)
    assert not (tmp_path / "other" / "videos.db").exists()


@pytest.mark.parametrize(
    ("present", "config"), [(None, "config.toml"), ("same", "config.toml"), ("other", "config.toml.restored")]
)
def test_restore_keeps_local_settings_and_stores_others_aside(
    home: tuple[Path, str], saved: Path, tmp_path: Path, present: str | None, config: str
) -> None:
    ours, theirs = tmp_path / "two" / "config.toml", (home[0] / "config.toml").read_bytes()
    ours.parent.mkdir()
    if present is not None:
        ours.write_bytes(theirs if present == "same" else b"# mine\n")
    assert restore(saved, tmp_path / "two", NOW).config == config
    assert (ours.parent / config).read_bytes() == theirs
    assert ours.read_bytes() == (b"# mine\n" if present == "other" else theirs)


def test_videos_of_a_newer_schema_are_refused(home: tuple[Path, str], tmp_path: Path) -> None:
    newer = len(VIDEO_MIGRATIONS) + 1
    file = forged(home[0], lambda tree: tree["schemas"].update({"videos.db": newer}))
    for read in (lambda: inspect_backup(file), lambda: restore(file, tmp_path / "other", NOW)):
        with pytest.raises(RestoreError, match=rf"videos\.db was written by a newer macpool \(schema {newer}"):
            read()


def test_a_broken_off_restore_is_finished_before_a_backup_is_made(home: tuple[Path, str], tmp_path: Path) -> None:
    staged = home[0] / RESTORING
    staged.mkdir()
    (staged / "commit.json").write_text("{}")
    with pytest.raises(BackupError, match="was interrupted: run `cluster up` to finish it, then back up"):
        create_backup(home[0], tmp_path / "b")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("name", ["authority/evil.PEM.pem", "videos/video_abc/.hidden.mp4"])
def test_a_file_of_another_program_is_named_and_not_taken(home: tuple[Path, str], tmp_path: Path, name: str) -> None:
    (home[0] / name).write_bytes(b"x")
    with pytest.raises(BackupError, match="is not a file of macpool: move it away, then back up"):
        create_backup(home[0], tmp_path / "b", artifacts=True)
    assert not (tmp_path / "b").exists()
    assert not list(home[0].glob(".backup-*"))


@pytest.mark.parametrize("missing", ["cluster.db", "authority/authority.pem"])
def test_half_of_a_cluster_is_not_backed_up(home: tuple[Path, str], tmp_path: Path, missing: str) -> None:
    (home[0] / missing).unlink()
    with pytest.raises(BackupError, match="there is no cluster in"):
        create_backup(home[0], tmp_path / "b")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_a_link_or_a_folder_in_the_place_of_a_file_is_named(home: tuple[Path, str], tmp_path: Path, kind: str) -> None:
    place = home[0] / "pepper"
    place.unlink()
    if kind == "link":
        place.symlink_to(tmp_path / "b-of-somebody")
        (tmp_path / "b-of-somebody").touch()
    else:
        place.mkdir()
    with pytest.raises(BackupError, match=f"{place} is not a file of macpool"):
        create_backup(home[0], tmp_path / "b")


def test_settings_that_are_missing_or_damaged_point_to_no_file(home: tuple[Path, str], tmp_path: Path) -> None:
    (home[0] / "config.toml").write_text("[[[")
    assert create_backup(home[0], tmp_path / "b").manifest.outside == ()
    (home[0] / "config.toml").unlink()
    made = create_backup(home[0], tmp_path / "b").manifest
    assert (made.outside, "config.toml" in {one.name for one in made.members}) == ((), False)


def test_a_backup_that_the_disk_does_not_take_leaves_nothing(
    home: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BackupError, match=r"no backup was made: .*No space left"):
        create_backup(home[0], tmp_path / "b")
    assert {one.name for one in tmp_path.iterdir()} == {"home"}
    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        create_backup(home[0], tmp_path / "b")
    assert {one.name for one in tmp_path.iterdir()} == {"home"}
    (tmp_path / "file").touch()
    with pytest.raises(BackupError, match="file/b cannot be written: Not a directory"):
        create_backup(home[0], tmp_path / "file" / "b")


def test_a_backup_and_a_restore_are_on_the_disk_before_they_get_their_names(
    home: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster(tmp_path / "other", "lab")
    syncs = SyncLog(monkeypatch)
    file = create_backup(home[0], tmp_path / "b").file
    assert (syncs.unsynced_content, syncs.unsynced_folders) == ([], [])
    done = restore(file, tmp_path / "other", NOW, replace=True)
    assert done.aside is not None
    installed = [path for path in syncs.unsynced_content if not path.is_relative_to(done.aside)]
    staging = tmp_path / "other" / RESTORING  # deleted after the restore
    assert (installed, [folder for folder in syncs.unsynced_folders if folder != staging]) == ([], [])


def test_a_target_that_cannot_be_read_is_a_clear_error(
    home: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "b"
    target.write_text("of another user")
    real = Path.open

    def refuse(self: Path, *arguments: Any) -> Any:
        if self == target:  # root can read every file
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return real(self, *arguments)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(BackupError, match="exists and cannot be read: Permission denied: choose another name"):
        create_backup(home[0], target)
