"""Create private folders, replace private files, and sync files and folders to the disk.

The module also resolves `~` in paths, and opens standard streams that are closed.
"""

import fcntl
import os
import sys
from contextlib import suppress
from pathlib import Path

FULL_SYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)
"""Operation of `fcntl` on macOS that writes a file to the medium; None on other systems.

`fsync` of macOS writes a file only to the cache of the drive, which a power failure clears (fsync(2)).
"""


def create_private_folder(folder: Path) -> Path:
    """Create a folder with mode 0700, or set the mode of an existing one, and return the path.

    Missing parents are created with mode 0700 as well. The modes of existing parents do not change. Raise OSError on
    failure.
    """
    if not folder.parent.exists():
        create_private_folder(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)
    folder.chmod(0o700)
    return folder


def write_private(path: Path, content: bytes) -> None:
    """Create or replace a file atomically, with this content and mode 0600, synced to the disk.

    The folder of the file must exist. Raise OSError on failure.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o600)
            file.write(content)
            file.flush()
            sync_descriptor(descriptor)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_path(path.parent)


def sync_descriptor(descriptor: int) -> None:
    """Sync an open file or folder to the disk. Raise OSError on failure."""
    if FULL_SYNC is not None:
        with suppress(OSError):  # such as on a network share
            fcntl.fcntl(descriptor, FULL_SYNC)
            return
    os.fsync(descriptor)


def sync_path(path: Path) -> None:
    """Sync a file, or the entries of a folder, to the disk. Raise OSError on failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync_descriptor(descriptor)
    finally:
        os.close(descriptor)


def resolve_home(text: str) -> Path:
    """Return the path that a setting names, with `~` or `~USER` replaced by the home folder.

    `~USER` of an unknown user is not replaced.
    """
    return Path(os.path.expanduser(text))


def sync_tree(folder: Path) -> None:
    """Sync a folder to the disk, with all files and folders in it. Raise OSError on failure.

    A later power failure then damages none of them, even if the folder is renamed meanwhile.
    """
    for path in (*folder.rglob("*"), folder):
        sync_path(path)


def open_missing_streams() -> None:
    """Open the null device as each standard stream that is closed. Call this before the process opens files.

    Otherwise another file would get the descriptor of the stream, and a write to the stream would raise
    `AttributeError`.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = os.fdopen(os.open(os.devnull, os.O_RDWR), mode)
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
