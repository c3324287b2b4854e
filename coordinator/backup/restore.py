"""Restore of a backup into a state folder: read the backup once, verify everything, then commit.

    read and check into STATE/restoring ─► examine: databases open, CA and database name one cluster ─► increment the
    generation ─► commit (`atomic_swap`), the one step at which the new state becomes valid

The generation marks a restored cluster as the newer of two. The new generation is at least the Unix time of the
restore. Nodes remember the highest generation, and a coordinator with a lower one stops (`generation_fence`).
"""

import itertools
import os
import sqlite3
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from coordinator.backup.archive import (
    DATABASE,
    FAMILY,
    HEAD_BYTES,
    MAGIC,
    VIDEOS,
    ArchiveError,
    Manifest,
    ReadableStream,
    check_end,
    read_manifest,
    read_member,
)
from coordinator.backup.atomic_swap import FileMoves, commit, create_staging, discard_staging, finish_swap
from coordinator.backup.encryption import FAMILIES, FORMER_MAGIC, DecryptingReader, EncryptionError, is_encrypted
from coordinator.backup.generation_fence import MARK_FILE
from coordinator.state.schema import MIGRATIONS
from coordinator.state.sqlite_file import open_database
from coordinator.state.state_lock import StateLock
from coordinator.state.store_errors import StoreError
from coordinator.tls.cluster_ca import AuthorityError, read_cluster_id
from coordinator.video.store import MIGRATIONS as VIDEO_MIGRATIONS
from host.private_files import create_private_folder, sync_descriptor

SCHEMAS = {DATABASE: MIGRATIONS, VIDEOS: VIDEO_MIGRATIONS}
"""Migrations of each database. Their number is the newest schema version that this version of Macpool reads."""
_BESIDES = ("", "-wal", "-shm")
RESERVED_EPOCHS = 1000
"""Epochs reserved for starts of the other coordinator since the backup.

Request numbers contain the epoch, and nodes treat a lower number as already counted.
"""
CONFIG, CONFIG_ASIDE = "config.toml", "config.toml.restored"
"""Name of the settings file, and of restored settings that differ from an existing settings file."""


class RestoreError(Exception):
    """Raised if a backup cannot be read or restored. The text has the reason and, if known, the next step."""


class PassphraseNeeded(RestoreError):
    """Raised if a backup is encrypted and no passphrase was given."""


@dataclass(frozen=True, slots=True)
class ExistingState:
    """Cluster that a state folder contains before a restore."""

    cluster: str
    """Id of the cluster; empty if the CA's file cannot be read."""
    changed: float
    """Time of the last change of its files in Unix seconds."""


@dataclass(frozen=True, slots=True)
class RestoredCounts:
    """Numbers of members, API keys, join tokens and video jobs in a restored state.

    Removed members, and revoked keys and tokens, are not counted.
    """

    members: int
    keys: int
    tokens: int
    jobs: int


@dataclass(frozen=True, slots=True)
class Restored:
    """Result of a completed restore."""

    manifest: Manifest
    counts: RestoredCounts
    generation: int
    """New generation of the coordinator."""
    aside: Path | None
    """Folder of the replaced files; None if no file was replaced."""
    config: str
    """Name of the settings file in the state folder; empty if the backup has no settings.

    `CONFIG`, or `CONFIG_ASIDE` if the folder already has other settings.
    """


def inspect_backup(file: Path, passphrase: bytes | None = None) -> Manifest:
    """Read and verify a whole backup, without changing anything, and return its manifest.

    Raise `PassphraseNeeded` if it is encrypted and `passphrase` is None. Raise `RestoreError` if it is not a backup,
    does not fit the passphrase, is damaged or too new, or cannot be read. Only `restore` checks that its CA and its
    databases are of one cluster.
    """
    try:
        with file.open("rb") as opened:
            source = _open_content(file, opened, passphrase)
            manifest = _check_schemas(read_manifest(source))
            for member in manifest.members:
                for _ in read_member(source, member):
                    pass
            check_end(source)
    except OSError as error:
        raise RestoreError(f"{file} cannot be read: {error.strerror}") from None
    except (ArchiveError, EncryptionError) as error:
        raise RestoreError(f"{file}: {error}") from None
    return manifest


def restore(file: Path, state: Path, now: float, *, passphrase: bytes | None = None, replace: bool = False) -> Restored:
    """Restore a backup into a state folder. `now` is Unix seconds; `replace` permits a folder with a cluster.

    Create the folder if it is missing, and finish an interrupted swap there first.

    Raise `PassphraseNeeded` if the backup is encrypted and `passphrase` is None, and `StateLockedError` if a
    coordinator runs in the folder. Raise `RestoreError` if the file is not a backup, does not fit the passphrase, or is
    damaged or too new. Other reasons: CA and databases of different clusters, a file that cannot be read or written, or
    a cluster in the folder without `replace`.

    After an error the former state is valid, unless the error occurs while the committed state is moved into place. In
    that case the next start or restore finishes the swap.
    """
    try:
        lock = StateLock(create_private_folder(state))
    except OSError as error:
        raise RestoreError(f"{state} cannot be written: {error.strerror}") from None
    try:
        finish_swap(state)
        with file.open("rb") as opened:
            return _restore(_open_content(file, opened, passphrase), state, now, replace=replace)
    except OSError as error:
        raise RestoreError(f"{error.filename or file}: {error.strerror}") from None
    except (ArchiveError, EncryptionError) as error:
        raise RestoreError(f"{file}: {error}") from None
    except (StoreError, AuthorityError, sqlite3.Error) as error:
        raise RestoreError(f"{file} cannot be restored: {error}") from None
    finally:
        discard_staging(state)
        lock.release()


def _open_content(file: Path, opened: BinaryIO, passphrase: bytes | None) -> ReadableStream:
    beginning = opened.read(HEAD_BYTES)
    opened.seek(0)
    if is_encrypted(beginning):
        if passphrase is None:
            raise PassphraseNeeded(f"{file} is encrypted: enter its passphrase, or use --passphrase-file FILE")
        content = DecryptingReader(opened, passphrase)
        if not beginning.startswith(FORMER_MAGIC):
            _check_format(file, content.read(len(MAGIC)))
        return content
    _check_format(file, opened.read(len(MAGIC)))
    return opened


def _check_format(file: Path, beginning: bytes) -> None:
    """Raise `RestoreError` unless a file, or its decrypted content, begins as a backup of this format."""
    if beginning == MAGIC:
        return
    if beginning.startswith((FAMILY, *FAMILIES)):
        raise RestoreError(f"{file} was made by a newer macpool: update macpool")
    raise RestoreError(f"{file} is not a macpool backup, or its beginning is missing")


def _check_schemas(manifest: Manifest) -> Manifest:
    """Return the manifest. Raise `ArchiveError` if a newer macpool wrote one of its databases."""
    for name, schema in manifest.schemas.items():
        known = len(SCHEMAS.get(name, ()))
        if schema > known:
            raise ArchiveError(
                f"its {name} was written by a newer macpool (schema {schema}, this one reads {known}; it was made by "
                f"{manifest.macpool}): update macpool"
            )
    return manifest


def find_existing_cluster(state: Path) -> ExistingState | None:
    """Return the cluster that a state folder contains; None if the folder has neither database nor CA."""
    database, authority = state / DATABASE, state / "authority" / "authority.pem"
    if not database.exists() and not authority.exists():
        return None
    try:
        cluster = read_cluster_id(authority)
    except AuthorityError:
        cluster = ""
    files = (database, database.with_name(f"{DATABASE}-wal"), authority)
    return ExistingState(cluster, max(file.stat().st_mtime for file in files if file.exists()))


def _restore(source: ReadableStream, state: Path, now: float, *, replace: bool) -> Restored:
    manifest = _check_schemas(read_manifest(source))
    existing = find_existing_cluster(state)
    if existing is not None and not replace:
        raise RestoreError(_build_occupied_message(state, manifest, existing))
    staged = create_staging(state)
    for member in manifest.members:
        _write_staged(staged, member.name, read_member(source, member))
    check_end(source)
    if read_cluster_id(staged / "authority" / "authority.pem") != manifest.cluster:
        raise ArchiveError("its authority belongs to another cluster")
    generation = max(manifest.generation + 1, int(now))
    counts = _examine(staged, manifest, generation)
    plan, config = _plan_moves(state, staged, manifest, existing, now)
    commit(state, plan)
    aside = state / plan.aside
    return Restored(manifest, counts, generation, aside if aside.exists() else None, config)


def _build_occupied_message(state: Path, manifest: Manifest, existing: ExistingState) -> str:
    if existing.cluster and existing.cluster != manifest.cluster:
        return (
            f"{state} has another cluster ({existing.cluster}), the backup is of {manifest.name} ({manifest.cluster}): "
            "choose another --state, or use --replace, which renames and keeps the existing files"
        )
    return (
        f"{state} has this cluster already, last changed at {_format_time(existing.changed)}; the backup was made at "
        f"{_format_time(manifest.made)}. A restore undoes later changes: keys and nodes that were revoked since then "
        "become valid again. To restore anyway, use --replace, which renames and keeps the existing files"
    )


def _format_time(seconds: float) -> str:
    """Format Unix seconds as local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _write_staged(staged: Path, name: str, pieces: Iterable[bytes]) -> None:
    """Write one private file below `staged` and sync it to disk."""
    path = staged / name
    for folder in reversed(path.relative_to(staged).parents):
        create_private_folder(staged / folder)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as out:
        for piece in pieces:
            out.write(piece)
        out.flush()
        sync_descriptor(descriptor)


def _examine(staged: Path, manifest: Manifest, generation: int) -> RestoredCounts:
    """Open the databases as the coordinator does, migrate their schema, and set the generation.

    Increase the epoch by `RESERVED_EPOCHS`. Raise `ArchiveError` if the database belongs to another cluster than the
    authority, and `StoreError` or `sqlite3.Error` if a database cannot be used.
    """
    with closing(open_database(staged / DATABASE, MIGRATIONS)) as connection:
        if connection.execute("SELECT cluster FROM meta").fetchone() != (manifest.cluster,):
            raise ArchiveError(f"its {DATABASE} and its authority belong to different clusters")
        connection.execute("UPDATE meta SET generation = ?, epoch = epoch + ?", (generation, RESERVED_EPOCHS))
        members, keys, tokens = (
            connection.execute(f"SELECT COUNT(*) FROM {selection}").fetchone()[0]  # noqa: S608  the texts are constants
            for selection in ("members WHERE removed IS NULL", "keys WHERE revoked IS NULL", "tokens WHERE NOT revoked")
        )
    jobs = 0
    if (staged / VIDEOS).exists():
        with closing(open_database(staged / VIDEOS, VIDEO_MIGRATIONS)) as connection:
            (jobs,) = connection.execute("SELECT COUNT(*) FROM jobs").fetchone()
    return RestoredCounts(members, keys, tokens, jobs)


def _plan_moves(
    state: Path, staged: Path, manifest: Manifest, existing: ExistingState | None, now: float
) -> tuple[FileMoves, str]:
    """Return the moves, and the name for the backup's settings, which get it in `staged`; empty without settings."""
    install = [name for name in (DATABASE, VIDEOS, "pepper", "authority") if (staged / name).exists()]
    remove = [name + besides for name in (DATABASE, VIDEOS) for besides in _BESIDES if name + besides not in install]
    if (staged / "videos").exists():
        install.append("videos")
    elif existing is None or existing.cluster != manifest.cluster:
        remove.append("videos")
    config = ""
    if (staged / CONFIG).exists():
        config = CONFIG_ASIDE if _has_other_settings(state / CONFIG, staged / CONFIG) else CONFIG
        (staged / CONFIG).rename(staged / config)
        install.append(config)
    aside = f"replaced-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}"
    return FileMoves(tuple(install), (*remove, MARK_FILE), _find_unused_name(state, aside)), config


def _has_other_settings(present: Path, restored: Path) -> bool:
    return present.exists() and present.read_bytes() != restored.read_bytes()


def _find_unused_name(state: Path, name: str) -> str:
    """Return an unused name for a folder in the state folder."""
    tries = (f"{name}-{number}" if number else name for number in itertools.count())
    return next(candidate for candidate in tries if not (state / candidate).exists())
