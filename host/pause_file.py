"""File with the pause that a person set for a node.

The file is written by `cluster pause` on the Mac, or by the node on request of the coordinator. The node reads it.
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
        """Path of the file."""

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
