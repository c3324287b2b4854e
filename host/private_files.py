"""Create folders and replace files that only this user can read, and write files and folders to the disk.

Also: resolve `~` in paths, and open standard streams that are closed.
"""

import fcntl
import os
import sys
from contextlib import suppress
from pathlib import Path

FULL_SYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)
"""Operation of `fcntl` on macOS that writes a file to the medium. `fsync` of macOS writes it to the cache of the drive,
which a power failure clears (fsync(2)). None on other systems."""


def create_private_folder(folder: Path) -> Path:
    """Create a folder of mode 0700, or change the mode of an existing one, and return it. Raise OSError on failure.

    Missing parents get mode 0700 as well, because `mkdir(parents=True)` uses the umask. Existing parents do not change.
    """
    if not folder.parent.exists():
        create_private_folder(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)
    folder.chmod(0o700)
    return folder


def write_private(path: Path, content: bytes) -> None:
    """Replace a file atomically by one of mode 0600 with this content, synced to disk. Raise OSError on failure."""
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
    """Write an open file or folder to the disk. Raise OSError on failure."""
    if FULL_SYNC is not None:
        with suppress(OSError):  # such as on a network share
            fcntl.fcntl(descriptor, FULL_SYNC)
            return
    os.fsync(descriptor)


def sync_path(path: Path) -> None:
    """Write a file or the entries of a folder to the disk. Raise OSError on failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync_descriptor(descriptor)
    finally:
        os.close(descriptor)


def resolve_home(text: str) -> Path:
    """Return the path that a setting names, with the home folder for `~` or `~USER`. An unknown user stays as it is."""
    return Path(os.path.expanduser(text))


def sync_tree(folder: Path) -> None:
    """Write a folder to the disk, with all files and folders in it. Raise OSError on failure.

    A power failure after that damages none of them, even if the folder is renamed.
    """
    for path in (*folder.rglob("*"), folder):
        sync_path(path)


def open_missing_streams() -> None:
    """Open the null device as each standard stream that is closed. Call this before the process opens files.

    Otherwise another file would get the number of the stream, and a write to the stream would raise `AttributeError`.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = os.fdopen(os.open(os.devnull, os.O_RDWR), mode)
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
