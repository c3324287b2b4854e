"""Backup of a cluster into one file. The coordinator may be running.

SQLite copies the databases, hence a concurrent write is in the copy completely or not at all. The CA's key, the pepper
and the digests of keys are included: a person who can read the file controls the cluster. The node of this machine is
not included, because its identity belongs to the machine.
"""

import hashlib
import os
import re
import shutil
import sqlite3
import stat
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import version as installed
from pathlib import Path
from typing import BinaryIO

from coordinator.backup import encryption
from coordinator.backup.archive import (
    CHUNK_BYTES,
    DATABASE,
    FAMILY,
    FORMAT,
    HEAD_BYTES,
    MAGIC,
    NAMES,
    VIDEOS,
    ArchiveMember,
    Manifest,
    compute_digest,
    encode_header,
)
from coordinator.backup.atomic_swap import is_unsettled
from coordinator.backup.encryption import DecryptingReader, EncryptingWriter, EncryptionError
from coordinator.tls.cluster_ca import AuthorityError, read_cluster_id
from host.private_files import create_private_folder, sync_descriptor, sync_path
from host.settings_loader import from_tree


class BackupError(Exception):
    """Raised if a backup fails. The text has the reason and, if known, the next step."""


@dataclass(frozen=True, slots=True)
class BackupResult:
    """Result of a completed backup."""

    file: Path
    size: int
    """Size of the file in bytes."""
    manifest: Manifest
    encrypted: bool


def create_backup(state: Path, file: Path, *, artifacts: bool = False, passphrase: bytes | None = None) -> BackupResult:
    """Write the cluster of a state folder into one private file, and replace an older backup of that name.

    `artifacts` includes the files of video jobs. `passphrase` encrypts the file; None leaves it unencrypted.

    Raise `BackupError` if the folder has no cluster or an interrupted restore, or if a file cannot be read or written.
    Other reasons: a foreign file in the folder, a file that changes during the backup, or a CA and a database of
    different clusters.

    `BackupError` is also raised if `file` exists and is not a backup. A file in the age format counts as a backup only
    if `passphrase` decrypts it to one. A file in the earlier encrypted format always does.
    """
    if not (state / DATABASE).exists() or not (state / "authority" / "authority.pem").exists():
        raise BackupError(f"there is no cluster in {state}: make the backup on the coordinator's machine")
    if is_unsettled(state):
        raise BackupError(f"a restore in {state} was interrupted: run `cluster up` to finish it, then back up")
    _check_target(file, passphrase)
    try:
        _delete_leftovers(state, file)
        with tempfile.TemporaryDirectory(prefix=f".backup-{os.getpid()}-", dir=state) as folder:
            members, manifest = _gather(state, create_private_folder(Path(folder)), artifacts=artifacts)
            size = _write(file, members, manifest, passphrase)
    except OSError as error:
        raise BackupError(f"no backup was made: {error.filename or file}: {error.strerror or error}") from None
    except (sqlite3.Error, AuthorityError) as error:
        raise BackupError(f"no backup was made: {error}") from None
    return BackupResult(file, size, manifest, passphrase is not None)


def _delete_leftovers(state: Path, file: Path) -> None:
    """Delete the temporary folders and files of killed backups, because they contain secrets.

    Raise `OSError` if that fails.
    """
    for folder in _find_leftovers(state, r"\.backup-(\d{1,9})-.*"):
        shutil.rmtree(folder)
    for beside in _find_leftovers(file.parent, re.escape(file.name) + r"\.(\d{1,9})\.new"):
        if beside.is_file() and not beside.is_symlink():
            beside.unlink()


def _find_leftovers(folder: Path, name: str) -> list[Path]:
    """Return the entries of a folder whose names match `name`, without those of running processes.

    `name` is a pattern with a group for the process id. Raise `OSError` if the folder cannot be read.
    """
    named = [(path, found) for path in folder.iterdir() if (found := re.fullmatch(name, path.name))]
    return [path for path, found in named if not _is_other_process(int(found[1]))]


def _is_other_process(process: int) -> bool:
    """Return whether a process with this id runs, other than this process.

    A leftover can have the id of this process, for example in a container.
    """
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # a process of another user
        return True
    return process != os.getpid()


def _check_target(file: Path, passphrase: bytes | None) -> None:
    """Raise `BackupError` unless the target is missing or a backup, because no other file may be replaced.

    An encrypted file counts as a backup if `passphrase` decrypts its start, or if it has the earlier format.
    """
    try:
        status = file.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise BackupError(f"{file} cannot be written: {error.strerror}") from None
    beginning, encrypted = b"", False
    try:
        if stat.S_ISREG(status.st_mode):
            with file.open("rb") as existing:
                beginning = existing.read(HEAD_BYTES)
                encrypted = beginning.startswith(encryption.MAGIC)
                if encrypted and passphrase is not None:
                    existing.seek(0)
                    beginning = _decrypt_beginning(existing, passphrase)
    except OSError as error:
        raise BackupError(f"{file} exists and cannot be read: {error.strerror}: choose another name") from None
    if not beginning.startswith((FAMILY, encryption.FORMER_FAMILY)):
        if encrypted and passphrase is None:
            raise BackupError(f"{file} exists and is encrypted: choose another name, or --encrypt with its passphrase")
        reason = "is encrypted, and not a backup with this passphrase" if encrypted else "is not a backup"
        raise BackupError(f"{file} exists and {reason}: choose another name")


def _decrypt_beginning(file: BinaryIO, passphrase: bytes) -> bytes:
    """Return the first decrypted bytes of an encrypted file; empty if it cannot be decrypted."""
    try:
        return DecryptingReader(file, passphrase).read(HEAD_BYTES)
    except EncryptionError:
        return b""


def _gather(state: Path, folder: Path, *, artifacts: bool) -> tuple[list[Path], Manifest]:
    """Copy the databases to `folder`. Return path and description of each member of the backup, in their order.

    Raise `BackupError` if a member is not a plain file, or if CA and database belong to different clusters.
    """
    schemas = {name: _copy(state / name, folder / name) for name in (DATABASE, VIDEOS) if (state / name).exists()}
    named = [(name, folder / name) for name in schemas]
    named += [(name, state / name) for name in ("config.toml", "pepper") if (state / name).exists()]
    named += [(f"authority/{file.name}", file) for file in sorted((state / "authority").glob("*.pem"))]
    named += list(_find_artifacts(state)) if artifacts else []
    for name, path in named:
        if NAMES.fullmatch(name) is None or path.is_symlink() or not path.is_file():
            raise BackupError(f"{path} is not a file of macpool: move it away, then back up")
    members = [ArchiveMember(name, *_measure(path)) for name, path in named]
    cluster, name, epoch, generation = _read_meta(folder / DATABASE)
    if read_cluster_id(state / "authority" / "authority.pem") != cluster:
        raise BackupError(f"{state / 'authority'} belongs to another cluster than {DATABASE}: restore a backup")
    manifest = Manifest(
        format=FORMAT,
        macpool=installed("macpool"),
        made=time.time(),
        cluster=cluster,
        name=name,
        epoch=epoch,
        generation=generation,
        schemas=schemas,
        members=tuple(members),
        artifacts=artifacts,
        outside=_find_outside_files(state / "config.toml"),
    )
    return [path for _, path in named], manifest


def _copy(database: Path, copy: Path) -> int:
    """Copy a database that may be in use. Return its schema version."""
    os.close(os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    with (
        closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True, timeout=10)) as source,
        closing(sqlite3.connect(copy)) as target,
    ):
        source.backup(target)
        target.execute("PRAGMA journal_mode = DELETE")
        return target.execute("PRAGMA user_version").fetchone()[0]


def _read_meta(database: Path) -> tuple[str, str, int, int]:
    with closing(sqlite3.connect(database)) as connection:
        cursor = connection.execute("SELECT * FROM meta")
        row = dict(zip((name for name, *_ in cursor.description), cursor.fetchone(), strict=True))
        return row["cluster"], row["name"], row["epoch"], row.get("generation", 0)


def _find_artifacts(state: Path) -> Iterator[tuple[str, Path]]:
    for folder in sorted((state / "videos").glob("video_*")):
        for file in sorted(folder.iterdir()):
            if file.suffix != ".part":
                yield f"videos/{folder.name}/{file.name}", file


def _measure(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        return compute_digest(file)


def _find_outside_files(config: Path) -> tuple[str, ...]:
    """Return the paths of the certificate and key files that the settings file names.

    Return an empty tuple if the settings file is missing or cannot be read.
    """
    try:
        flat = from_tree(tomllib.loads(config.read_text())) if config.exists() else {}
    except (OSError, ValueError):
        return ()
    return tuple(str(flat[key]) for key in ("http.tls_cert_file", "http.tls_key_file") if flat.get(key))


def _write(file: Path, members: list[Path], manifest: Manifest, passphrase: bytes | None) -> int:
    """Write to a temporary file, sync it, and rename it into place. Return its size in bytes."""
    beside = file.with_name(f"{file.name}.{os.getpid()}.new")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as out:
            writer = _Writer(out, passphrase)
            writer.write(encode_header(manifest))
            for path, member in zip(members, manifest.members, strict=True):
                with path.open("rb") as source:
                    _write_member(source, writer, member)
            writer.finish()
            out.flush()
            sync_descriptor(out.fileno())
        size = beside.stat().st_size
        beside.replace(file)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_path(file.parent)
    return size


class _Writer:
    """Writer of a backup file, encrypted if `passphrase` is not None. The constructor writes `MAGIC`."""

    def __init__(self, out: BinaryIO, passphrase: bytes | None) -> None:
        self._encryption = EncryptingWriter(out, passphrase) if passphrase is not None else None
        self.write = out.write if self._encryption is None else self._encryption.write
        self.write(MAGIC)

    def finish(self) -> None:
        if self._encryption is not None:
            self._encryption.finish()


def _write_member(source: BinaryIO, writer: _Writer, member: ArchiveMember) -> None:
    """Write a member. Raise `BackupError` if it differs from its description."""
    digest, size = hashlib.sha256(), 0
    while piece := source.read(CHUNK_BYTES):
        writer.write(piece)
        digest.update(piece)
        size += len(piece)
    if (size, digest.hexdigest()) != (member.size, member.sha256):
        raise BackupError(f"{member.name} changed during the backup: back up again")
