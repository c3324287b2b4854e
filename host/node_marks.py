"""Files in the folder of a node that have effect beyond its process: the pause, and the mark of a node that left.

The pause is a file, which the node reads. `cluster pause` on the Mac writes this file. The node writes it when the
coordinator requests a pause. The other mark is for the coordinator on the same Mac: it restarts no node that left its
cluster on purpose.
"""

from pathlib import Path

import msgspec

from host.private_files import create_private_folder, write_private

FILE = "pause.json"
MAX_NAME_CHARS = 100
"""Maximum characters of `PauseRecord.by`."""


class PauseRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Pause of a node, during which the node accepts no new requests."""

    until: float | None
    """End in Unix seconds; None until a person resumes the node."""
    by: str = ""
    """Person or API key that set the pause; empty for the owner of the Mac."""


class PauseFile:
    """Reader and writer of the pause file in the folder of a node (`STATE/node`)."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        """Path of the pause file."""

    def write(self, pause: PauseRecord) -> None:
        """Store a pause in place of an earlier one, with at most MAX_NAME_CHARS of `by`. Raise OSError if that
        fails."""
        create_private_folder(self.path.parent)
        record = PauseRecord(pause.until, pause.by[:MAX_NAME_CHARS])
        write_private(self.path, msgspec.json.encode(record))

    def remove(self) -> bool:
        """Remove the pause. Return whether there was one. Raise OSError if that fails."""
        there = self.path.exists()
        self.path.unlink(missing_ok=True)
        return there

    def read_stamp(self) -> tuple[int, int] | None:
        """Return a value that changes when the file does; None without a file. Raise OSError for other failures."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return None
        return status.st_mtime_ns, status.st_ino

    def read(self) -> PauseRecord:
        """Return the stored pause. Raise OSError without a readable file, ValueError for an invalid one."""
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=PauseRecord)
        except msgspec.MsgspecError as error:
            raise ValueError(str(error)) from None


def mark_left(node: Path) -> None:
    """Record that the node with the folder `node` (STATE/node) left its cluster. Raise OSError if that fails."""
    (node / "left").touch(mode=0o600)


def has_left(node: Path) -> bool:
    """Return whether the node with the folder `node` left its cluster, and has not been started or joined again."""
    return (node / "left").exists()


def delete_left_mark(node: Path) -> None:
    """Delete the file of `mark_left`, because the node joins again or is started. Raise OSError if that fails."""
    (node / "left").unlink(missing_ok=True)
