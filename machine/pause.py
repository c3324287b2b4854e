"""The file in which a person's pause is kept on a Mac: written by `cluster pause` there, or by its node when the
coordinator asks for it; read by the node."""

from pathlib import Path

import msgspec

from machine.private import private_folder, write_private

FILE = "pause.json"
LONGEST_BY = 100
"""Letters of who paused it."""


class Pause(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Nothing new is taken until `until` (Unix seconds, None: until it is resumed), `by` whom; empty: its owner."""

    until: float | None
    by: str = ""


class PauseFile:
    """The file in a node's folder, `STATE/node`."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE

    def write(self, pause: Pause) -> None:
        """Keep a pause, in place of any other. OSError when it cannot be written."""
        private_folder(self.path.parent)
        kept = Pause(pause.until, pause.by[:LONGEST_BY])
        write_private(self.path, msgspec.json.encode(kept))

    def remove(self) -> bool:
        """End a pause; say whether there was one. OSError when the file cannot be removed."""
        there = self.path.exists()
        self.path.unlink(missing_ok=True)
        return there

    def stamp(self) -> tuple[int, int] | None:
        """Give what changes with the file; None where there is none. OSError when it cannot be seen."""
        try:
            seen = self.path.stat()
        except FileNotFoundError:
            return None
        return seen.st_mtime_ns, seen.st_ino

    def read(self) -> Pause:
        """Read it. OSError or ValueError when that is not possible."""
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=Pause)
        except msgspec.MsgspecError as error:
            raise ValueError(str(error)) from None
