"""Manage the folder of one repository in the Hugging Face cache: paths, lock, links and references.

The layout is that of `huggingface_hub`: `models--P--N/blobs/ETAG`, links `snapshots/COMMIT/PATH` to the blobs, and
`refs/NAME` with a commit. Other tools use the same cache.

Rules for the processes of Macpool
- Nothing is written through a symbolic link. A folder of the layout that is a link is refused.
- A blob gets its name only after its content was verified (`node.hub.download.part_file`).
- Links are created only after all blobs of the manifest are verified, and references after the links.
- One process at a time changes a repository. The lock is released by the system when its process ends.
"""

import errno
import fcntl
import os
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from node.hub.errors import ModelFileError
from wire.frames.model_files import ModelOrderCode
from wire.models.files import ModelManifest

PART_SUFFIX = ".macpool-part"
JOURNAL_SUFFIX = ".macpool-journal"
_NEW_SUFFIX = ".macpool-new"
LOCK_NAME = "macpool.lock"
LOCK_POLL_SECONDS = 0.05
LOCK_TIMEOUT_SECONDS = 3.0
"""Maximum seconds to wait for the lock of a repository. A cancelled download releases the lock within this time.

A mirror holds the lock for an instant, to find out whether a download runs.
"""


class RepositoryFolder:
    """Folder of the repository `repo` (`publisher/name`) in the cache folder `hub`."""

    def __init__(self, hub: Path, repo: str) -> None:
        self.hub = hub
        self.repo = repo
        self.root = hub / f"models--{repo.replace('/', '--')}"
        """Folder of the repository."""
        self.blobs = self.root / "blobs"
        self.snapshots = self.root / "snapshots"
        self.refs = self.root / "refs"

    def get_blob(self, etag: str) -> Path:
        """Return the path of the blob with this ETag: a complete and verified file."""
        return self.blobs / etag

    def get_part(self, etag: str) -> Path:
        """Return the path of the partial file with this ETag, while it is downloaded."""
        return self.blobs / f"{etag}{PART_SUFFIX}"

    def get_journal(self, etag: str) -> Path:
        """Return the path of the journal of the partial file with this ETag."""
        return self.blobs / f"{etag}{JOURNAL_SUFFIX}"

    def get_snapshot(self, commit: str) -> Path:
        """Return the folder with the links to the files of a commit (40 hex digits)."""
        return self.snapshots / commit

    @property
    def lock_file(self) -> Path:
        """File of the lock, outside of the folder, because the folder can be removed under the lock."""
        return self.hub / ".locks" / self.root.name / LOCK_NAME

    def prepare(self) -> None:
        """Create the folders of the repository, its blobs, snapshots and references.

        Raise `ModelFileError` if one of them is a link or a file, or if the disk does not support symbolic links. Raise
        `OSError` if a folder cannot be created.
        """
        self.hub.mkdir(parents=True, exist_ok=True)
        for folder in (self.root, self.blobs, self.snapshots, self.refs):
            _create_real_folder(folder)
        self._check_links()

    def _check_links(self) -> None:
        """Create and remove a symbolic link. Raise `ModelFileError` if the disk has none, as exFAT."""
        link = self.blobs / f".link{_NEW_SUFFIX}"
        link.unlink(missing_ok=True)
        try:
            link.symlink_to("..")
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM, errno.ENOSYS):
                raise
            raise ModelFileError(
                ModelOrderCode.INVALID,
                f"the disk of {self.hub} has no symbolic links, as exFAT, and the Hugging Face cache needs them: move "
                "the cache to a disk with APFS, and set models.huggingface_cache",
            ) from None
        link.unlink()

    @contextmanager
    def lock(self) -> Generator[None]:
        """Hold the lock of the repository while the block runs. Wait up to `LOCK_TIMEOUT_SECONDS` for the lock.

        The wait blocks the thread. Raise `ModelFileError` (`in_use`) if another process holds the lock for longer,
        `OSError` if the lock file cannot be opened.
        """
        clock = threading.Event()
        deadline = time.monotonic() + LOCK_TIMEOUT_SECONDS
        while (descriptor := self._try_lock()) is None and time.monotonic() < deadline:
            clock.wait(LOCK_POLL_SECONDS)
        if descriptor is None:
            raise ModelFileError(
                ModelOrderCode.IN_USE, f"another process works on {self.repo} in {self.hub}: wait for its end"
            )
        try:
            yield
        finally:
            os.close(descriptor)

    def is_locked(self) -> bool:
        """Return whether a process holds the lock now. The check takes a free lock for an instant.

        Raise `OSError` if the lock file cannot be opened.
        """
        if not self.lock_file.exists():
            return False
        descriptor = self._try_lock()
        if descriptor is None:
            return True
        os.close(descriptor)
        return False

    def _try_lock(self) -> int | None:
        self.lock_file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return None
        return descriptor

    def create_snapshot(self, manifest: ModelManifest) -> None:
        """Create the links of a commit, and replace existing ones. The caller must have verified every file.

        Raise `ModelFileError` if a folder below the snapshot is a link or a file, `OSError` on failure.
        """
        snapshot = self.get_snapshot(manifest.commit)
        _create_real_folder(snapshot)
        for file in manifest.files:
            parts = file.path.split("/")
            folder = snapshot
            for part in parts[:-1]:
                folder = folder / part
                _create_real_folder(folder)
            target = "/".join([*[".."] * (len(parts) + 1), "blobs", file.etag])
            _replace_link(folder / parts[-1], target)

    def write_references(self, commit: str, names: tuple[str, ...]) -> None:
        """Write `refs/NAME` with a commit for each of the branches or tags in `names`, each file atomically.

        Raise `ModelFileError` if a folder below `refs` is a link or a file, `OSError` on failure.
        """
        for name in names:
            parts = name.split("/")
            folder = self.refs
            for part in parts[:-1]:
                folder = folder / part
                _create_real_folder(folder)
            new = folder / f".{parts[-1]}{_NEW_SUFFIX}"
            new.unlink(missing_ok=True)
            new.write_text(commit, encoding="ascii")
            new.replace(folder / parts[-1])

    def remove_parts(self) -> None:
        """Remove the partial files of Macpool, including those of abandoned downloads. Files of other tools stay.

        Raise `OSError` on failure.
        """
        with suppress(FileNotFoundError):
            for path in tuple(self.blobs.iterdir()):
                if path.name.endswith((PART_SUFFIX, JOURNAL_SUFFIX, _NEW_SUFFIX)):
                    path.unlink(missing_ok=True)


def _create_real_folder(folder: Path) -> None:
    with suppress(FileExistsError):
        folder.mkdir()
    if folder.is_symlink() or not folder.is_dir():
        raise ModelFileError(
            ModelOrderCode.INVALID,
            f"{folder} is a link or a file, and files are written only into real folders: move it",
        )


def _replace_link(path: Path, target: str) -> None:
    if path.is_symlink() and os.readlink(path) == target:
        return
    new = path.with_name(f".{path.name}{_NEW_SUFFIX}")
    new.unlink(missing_ok=True)
    new.symlink_to(target)
    new.replace(path)
