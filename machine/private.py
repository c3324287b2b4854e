"""Files that only their owner reads, written whole or not at all."""

import os
from pathlib import Path


def private_folder(folder: Path) -> Path:
    """Make a folder of mode 0700, or narrow an existing one to it. OSError when that is not possible.

    What is missing above it is made so, too (mkdir's own parents follow the umask); what is there stays as it is."""
    if not folder.parent.exists():
        private_folder(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)
    folder.chmod(0o700)
    return folder


def write_private(path: Path, content: bytes) -> None:
    """Replace a file by one of mode 0600 that is on the disk when this returns. OSError when it is not."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.new")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, 0o600)
        file.write(content)
        file.flush()
        os.fsync(descriptor)
    beside.replace(path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
