"""Store the leases of a node on its disk, from which a restarted agent recovers."""

import hashlib
import shutil
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog

from host.private_files import create_private_folder, write_private
from node.video.lease_rules import LeaseLedger, LeaseRecord
from node.video.worker.lease_files import GRANT, OUT, SCRATCH
from wire.video import Artifact

MIN_FREE_DISK_BYTES = 64 * 1024
"""Free bytes below which a disk counts as full, and the failure of a worker is attributed to the full disk."""
MAX_ENDED_LEASES = 32
"""Maximum number of ended leases without acknowledgement. Above that, the oldest are removed with their files."""
PREFIX = "artifact:"
"""Prefix of the name of an artifact (`LeaseStore.find_artifact`)."""

log = structlog.get_logger("node.video.lease_manager")


class LeaseStore:
    """Store of the leases and of their files, below `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ledger = LeaseLedger()

    @property
    def ledger(self) -> LeaseLedger:
        """Leases that have not ended or are not acknowledged, and the newest generation of each job."""
        return self._ledger

    @property
    def ended(self) -> tuple[LeaseRecord, ...]:
        """Leases that have ended and are not acknowledged, oldest first."""
        return tuple(record for record in self._ledger.leases if record.ended is not None)

    def load(self) -> None:
        """Read the ledger of an earlier agent, and remove folders that belong to no lease.

        Raise `OSError` if the folder cannot be used. An unreadable ledger is logged and counts as empty.
        """
        create_private_folder(self._folder)
        try:
            self._ledger = msgspec.json.decode((self._folder / "leases.json").read_bytes(), type=LeaseLedger)
        except FileNotFoundError:
            self._ledger = LeaseLedger()
        except (OSError, msgspec.MsgspecError) as error:
            log.error("leases unreadable", error=str(error))  # noqa: TRY400  the sentence is for a person
            self._ledger = LeaseLedger()
        known = {f"{record.lease}.{record.generation}" for record in self._ledger.leases}
        for entry in self._folder.iterdir():
            if entry.is_dir() and entry.name not in known:
                shutil.rmtree(entry, ignore_errors=True)

    def get_folder(self, record: LeaseRecord) -> Path:
        """Return the folder of a lease, which may not exist."""
        return self._folder / f"{record.lease}.{record.generation}"

    def put(self, record: LeaseRecord) -> bool:
        """Store a lease in place of its earlier state. Return whether the ledger was written to the disk.

        The ledger in memory has the lease in both cases.
        """
        self._ledger = self._ledger.put(record)
        return self._save()

    def end(self, record: LeaseRecord) -> None:
        """Store a lease that has ended, and delete its output if it has no artifacts.

        If there are more than `MAX_ENDED_LEASES` ended leases, delete the oldest.
        """
        self.put(record)
        if record.ended is not None and not record.ended.artifacts:
            shutil.rmtree(self.get_folder(record) / OUT, ignore_errors=True)
        for old in self.ended[:-MAX_ENDED_LEASES]:
            self.delete(old)

    def drop(self, record: LeaseRecord) -> None:
        """Remove a lease from the ledger, but delete no files. The ledger keeps the newest generation of its job."""
        self._ledger = self._ledger.drop(record.lease, record.generation)
        self._save()

    def delete(self, record: LeaseRecord) -> None:
        """Remove a lease from the ledger, and delete its folder. A later `load` deletes files that remain."""
        self.drop(record)
        shutil.rmtree(self.get_folder(record), ignore_errors=True)

    def clean(self, record: LeaseRecord) -> None:
        """Delete the grant of a lease and its scratch folder.

        Without the grant, no worker can start for this lease any more. Raise `OSError` if the grant cannot be deleted.
        """
        (self.get_folder(record) / GRANT).unlink(missing_ok=True)
        shutil.rmtree(self.get_folder(record) / SCRATCH, ignore_errors=True)

    def find_artifact(self, name: str) -> Path | None:
        """Return the path of the file that `artifact:LEASE/NAME` names.

        Return None if no ended lease of this node has reported an artifact of this name. The file itself is not
        checked.
        """
        lease, _, file = name.removeprefix(PREFIX).partition("/")
        record = next((entry for entry in self.ended if entry.lease == lease), None)
        known = (
            record is not None
            and record.ended is not None
            and any(artifact.name == file for artifact in record.ended.artifacts)
        )
        return self.get_folder(record) / OUT / file if record is not None and known else None

    def is_full(self) -> bool:
        """Return whether the disk has less than `MIN_FREE_DISK_BYTES` free; False if the free bytes cannot be read."""
        with suppress(OSError):
            return shutil.disk_usage(self._folder).free < MIN_FREE_DISK_BYTES
        return False

    def _save(self) -> bool:
        """Write the ledger to the disk. Return whether that succeeded; a granted lease continues in either case."""
        try:
            write_private(self._folder / "leases.json", msgspec.json.encode(self._ledger))
        except OSError as error:
            log.error("leases unwritable", error=str(error))  # noqa: TRY400  the sentence is for a person
            return False
        return True


def hash_artifacts(folder: Path, names: object) -> tuple[Artifact, ...]:
    """Return the artifacts that a worker reported, with size and SHA-256; empty if the clip is missing or empty.

    `folder` is the folder of the lease. `names` is the list of files in the worker's report, which may be invalid.
    Raise `OSError` if a file cannot be read.
    """
    artifacts: list[Artifact] = []
    for name in ("video.mp4", "thumbnail.webp"):
        file = folder / OUT / name
        if isinstance(names, list) and name in names and file.is_file() and not file.is_symlink():
            with file.open("rb") as opened:
                digest = hashlib.file_digest(opened, "sha256").digest()
            artifacts.append(Artifact(name, file.stat().st_size, digest))
    complete = bool(artifacts) and artifacts[0].name == "video.mp4" and artifacts[0].size > 0
    return tuple(artifacts) if complete else ()
