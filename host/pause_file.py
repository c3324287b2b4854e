"""File with the pause that a person set for a node.

`cluster pause` on the Mac writes it, or the node on request of the coordinator. The node reads it.
"""

from pathlib import Path

import msgspec

from host.private_files import private_folder, write_private

FILE = "pause.json"
MAX_NAME_CHARS = 100
"""Maximum characters of `PauseRecord.by`."""


class PauseRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A pause: the node accepts no new requests."""

    until: float | None
    """End in Unix seconds; None until a person resumes the node."""
    by: str = ""
    """Person who set the pause; empty for the owner of the Mac."""


class PauseFile:
    """Pause file in the folder of a node (`STATE/node`)."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE

    def write(self, pause: PauseRecord) -> None:
        """Write a pause; replaces an earlier one. Raises OSError."""
        private_folder(self.path.parent)
        kept = PauseRecord(pause.until, pause.by[:MAX_NAME_CHARS])
        write_private(self.path, msgspec.json.encode(kept))

    def remove(self) -> bool:
        """Remove the file; return whether it existed. Raises OSError."""
        there = self.path.exists()
        self.path.unlink(missing_ok=True)
        return there

    def stamp(self) -> tuple[int, int] | None:
        """Return a value that changes with the file; None without a file. Raises OSError."""
        try:
            seen = self.path.stat()
        except FileNotFoundError:
            return None
        return seen.st_mtime_ns, seen.st_ino

    def read(self) -> PauseRecord:
        """Read the pause. Raises OSError or ValueError."""
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=PauseRecord)
        except msgspec.MsgspecError as error:
            raise ValueError(str(error)) from None
