"""Records of pulls on the coordinator's disk: one private JSON file for each, in STATE/pulls."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import structlog

from coordinator.models.pull_values import PullState
from host.private_files import create_private_folder, write_private
from wire.models.files import ModelManifest

MAX_ENDED_RECORDS = 50
"""Maximum number of records of ended pulls. The oldest ones above it are deleted when a pull starts."""
_ID = re.compile(r"pull-[0-9a-f]{12}")

log = structlog.get_logger("coordinator.models.pull_records")


@dataclass(frozen=True, slots=True, kw_only=True)
class PullRecord:
    """Pull with its manifest, its origin and its state. Times are in Unix seconds."""

    id: str
    manifest: ModelManifest
    state: PullState
    started: float
    ended: float | None = None
    """Time of the end in Unix seconds; None while the pull is open."""
    actor: str = ""
    """Actor that started the pull, as in the audit log (`AuditRow.actor`)."""

    def set_state(self, state: PullState, now: float) -> "PullRecord":
        """Return the record with another state. If that state has ended, `now` (Unix seconds) becomes the end."""
        return replace(self, state=state, ended=self.ended or (now if state.has_ended else None))


class PullRecords:
    """Records in the folder `pulls` of a state folder. The first write creates the folder."""

    def __init__(self, state: Path) -> None:
        self._folder = state / "pulls"

    def load(self) -> list[PullRecord]:
        """Return the stored pulls, oldest first. A file that cannot be read is logged and omitted."""
        records: list[PullRecord] = []
        for file in sorted(self._folder.glob("*.json")) if self._folder.exists() else ():
            try:
                records.append(msgspec.json.decode(file.read_bytes(), type=PullRecord))
            except (OSError, msgspec.DecodeError) as error:
                log.warning("pull record unreadable", file=str(file), why=str(error)[:200])
        return sorted(records, key=lambda record: (record.started, record.id))

    def store(self, record: PullRecord) -> None:
        """Write a record. Raise `OSError` on failure, and `ValueError` if its id is not the id of a pull."""
        create_private_folder(self._folder)
        write_private(self._get_file(record.id), msgspec.json.encode(record))

    def delete(self, pull: str) -> None:
        """Delete a record. Do nothing if there is none.

        Raise `OSError` on failure, and `ValueError` if `pull` is not the id of a pull.
        """
        self._get_file(pull).unlink(missing_ok=True)

    def _get_file(self, pull: str) -> Path:
        if _ID.fullmatch(pull) is None:
            raise ValueError(f"{pull!r} is not the id of a pull")
        return self._folder / f"{pull}.json"
