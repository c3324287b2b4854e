"""Read and write files in the folder of a node that outlive its process: the pause, and the mark of a node that left.

`cluster pause` on the Mac writes the pause file, as does the node when the coordinator requests a pause. The node reads
the file. The coordinator on the same Mac reads the mark of a node that left, and does not restart such a node.
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
        """Store a pause in place of an earlier one, with at most MAX_NAME_CHARS characters of `by`.

        Raise OSError on failure.
        """
        create_private_folder(self.path.parent)
        record = PauseRecord(pause.until, pause.by[:MAX_NAME_CHARS])
        write_private(self.path, msgspec.json.encode(record))

    def remove(self) -> bool:
        """Delete the pause file. Return whether there was one. Raise OSError on failure."""
        there = self.path.exists()
        self.path.unlink(missing_ok=True)
        return there

    def read_stamp(self) -> tuple[int, int] | None:
        """Return a value that changes when the pause file changes; None without a file. Raise OSError on failure."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return None
        return status.st_mtime_ns, status.st_ino

    def read(self) -> PauseRecord:
        """Return the stored pause. Raise OSError if the file is missing or unreadable, ValueError if it is invalid."""
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=PauseRecord)
        except msgspec.MsgspecError as error:
            raise ValueError(str(error)) from None


def mark_left(node: Path) -> None:
    """Record that the node with the folder `node` (STATE/node) has left its cluster. Raise OSError on failure."""
    (node / "left").touch(mode=0o600)


def has_left(node: Path) -> bool:
    """Return whether the node with the folder `node` (STATE/node) has left its cluster and not been started since."""
    return (node / "left").exists()


def delete_left_mark(node: Path) -> None:
    """Delete the mark of `mark_left`, because the node joins again or is started. Raise OSError on failure."""
    (node / "left").unlink(missing_ok=True)
