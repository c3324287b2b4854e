"""Compute and store the SHA-256 digests of model files, and compute the content hash of a model.

The store is one private JSON file of this node. Child processes write the store, and the agent reads it. An entry is
valid as long as size, time of change and inode of its file are unchanged. The content hash of a model is the SHA-256
over path and SHA-256 of each file that changes answers: `IDENTITY_FILES` and all safetensors files.
"""

import errno
import fcntl
import hashlib
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from host.private_files import create_private_folder, write_private
from node.hub.errors import ModelFileError
from node.models.identity_files import IDENTITY_FILES
from node.models.weight_files import list_visible_files
from wire.frames.model_files import ModelOrderCode
from wire.models.files import ModelFile

READ_BYTES = 1024 * 1024
STORE_NAME = "digests.json"


class FileDigest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """SHA-256 of a file, in hex digits, while the file has this size in bytes, `mtime_ns` and inode.

    `mtime_ns` is the time of the last change in Unix nanoseconds.
    """

    size: int
    mtime_ns: int
    inode: int
    sha256: str


_FileState = tuple[int, int, int]


class ContentHasher:
    """Incremental hash of a file's content: SHA-256, and git's SHA-1 if the manifest has no SHA-256 of the file.

    `update` must get all bytes in order.
    """

    def __init__(self, file: ModelFile) -> None:
        self._expected = file.etag
        self._sha256 = hashlib.sha256()
        self._git = None if file.sha256 else hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)

    def update(self, data: bytes) -> None:
        """Add the next bytes of the file."""
        self._sha256.update(data)
        if self._git is not None:
            self._git.update(data)

    @property
    def sha256(self) -> str:
        """SHA-256 of the added bytes, as hex digits."""
        return self._sha256.hexdigest()

    @property
    def digest(self) -> str:
        """Digest of the added bytes to compare with the manifest, as hex digits: SHA-256, or else git's SHA-1."""
        return self.sha256 if self._git is None else self._git.hexdigest()

    def is_expected(self) -> bool:
        """Return whether the added bytes have the digest that the manifest names."""
        return self.digest == self._expected


class DigestStoreError(ModelFileError):
    """Raised if the digest store cannot be written. The code is `disk_full` or `failed`."""

    def __init__(self, file: Path, error: OSError) -> None:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        step = "free disk space there, then try again" if is_full else "check its folder, then try again"
        text = f"the digests of files cannot be written to {file}: {error.strerror or type(error).__name__}: {step}"
        super().__init__(ModelOrderCode.DISK_FULL if is_full else ModelOrderCode.FAILED, text)


class DigestStore:
    """Store of digests in a file. `find` reads the file again after another process has replaced it."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._state: _FileState = (-1, -1, -1)
        self._digests: Mapping[str, FileDigest] = {}

    def find(self, path: Path) -> str:
        """Return the stored SHA-256 of a file, as hex digits.

        Return an empty text if none is stored, or if the file is missing or has changed since then.
        """
        self._refresh()
        digest = self._digests.get(os.path.realpath(path))
        if digest is None or _read_state(path) != (digest.size, digest.mtime_ns, digest.inode):
            return ""
        return digest.sha256

    def add(self, digests: Mapping[Path, FileDigest]) -> None:
        """Add or replace the entries of these files, and remove entries of files that are missing.

        Block while another process writes the store. Raise `DigestStoreError` on failure.
        """
        try:
            self._add(digests)
        except OSError as error:
            raise DigestStoreError(self._file, error) from error

    def _add(self, digests: Mapping[Path, FileDigest]) -> None:
        create_private_folder(self._file.parent)
        lock = os.open(self._file.with_name(f"{self._file.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._refresh()
            after = {path: digest for path, digest in self._digests.items() if os.path.exists(path)}
            after |= {os.path.realpath(path): digest for path, digest in digests.items()}
            write_private(self._file, msgspec.json.encode(after))
        finally:
            os.close(lock)

    def _refresh(self) -> None:
        state = _read_state(self._file)
        if state == self._state:
            return
        digests: dict[str, FileDigest] = {}
        with suppress(OSError, msgspec.DecodeError):
            digests = msgspec.json.decode(self._file.read_bytes(), type=dict[str, FileDigest])
        self._digests, self._state = digests, state  # at once: several threads read


def list_content_files(folder: Path) -> list[str]:
    """Return the sorted paths of the files below a model folder that change answers.

    Files without access are omitted. Raise `OSError` if the folder cannot be listed, except for a missing permission.
    """
    named = {name for name in IDENTITY_FILES if os.path.exists(folder / name)}
    return sorted(named | {file.name for file in list_visible_files(folder, "*.safetensors")})


def find_content(folder: Path, store: DigestStore) -> str:
    """Return the content hash of a model folder, 64 hex digits; empty if the digest of a file is unknown.

    Raise the errors of `list_content_files`.
    """
    return compute_content({path: store.find(folder / path) for path in list_content_files(folder)})


def compute_content(digests: Mapping[str, str]) -> str:
    """Return the content hash of files, given the SHA-256 by path; empty without files or if a digest is empty."""
    if not digests or not all(digests.values()):
        return ""
    content = hashlib.sha256()
    for path, sha256 in sorted(digests.items()):
        content.update(f"{path}\0{sha256}\n".encode())
    return content.hexdigest()


def record_digest(path: Path, sha256: str) -> FileDigest:
    """Return the store entry of a file with its current size, time of change and inode.

    `sha256` (hex digits) must be the digest of its content. Raise `OSError` if the file is missing.
    """
    stat = path.stat()
    return FileDigest(stat.st_size, stat.st_mtime_ns, stat.st_ino, sha256)


def hash_file(path: Path, add: Callable[[bytes], object]) -> FileDigest | None:
    """Read a file and return its store entry; None if the file changed meanwhile.

    `add` is called with each block. Raise `OSError` if the file cannot be read.
    """
    sha256 = hashlib.sha256()
    before = _read_state(path)
    with path.open("rb", buffering=0) as opened:
        while block := opened.read(READ_BYTES):
            sha256.update(block)
            add(block)
    return FileDigest(*before, sha256.hexdigest()) if _read_state(path) == before else None


def _read_state(path: Path) -> _FileState:
    try:
        stat = path.stat()
    except OSError:
        return (0, 0, 0)
    return (stat.st_size, stat.st_mtime_ns, stat.st_ino)
