"""Measured speeds of models on nodes, in the private file STATE/benchmarks.json.

Only the newest record of each node, model version, operating system and version of Macpool is kept.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import structlog

from host.private_files import write_private
from wire.identity import NodeId

MAX_RECORDS = 1000
"""Maximum number of records; the oldest records above it are deleted."""

log = structlog.get_logger("coordinator.model_tools.benchmark_records")


class BenchmarkRun(msgspec.Struct, frozen=True, kw_only=True):
    """Measurement of parallel requests with one prompt length. Speeds are those of all requests together."""

    prompt_tokens: int
    """Prompt tokens of each request."""
    parallel: int
    """Number of requests that ran at the same time."""
    generated: int = 0
    """Generated tokens of all requests."""
    prefill_speed: float = 0.0
    """Prefilled prompt tokens per second, without cached tokens; 0 if the run was skipped."""
    decode_speed: float = 0.0
    """Generated tokens per second; 0 if the answers were too short to measure, or the run was skipped."""
    skipped: str = ""
    """Reason why the run was skipped: the model's context, or the refusal of the node; empty if it was measured."""


class BenchmarkRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Measured speeds of one model on one node."""

    node: NodeId
    """Id of the node."""
    model: str
    fingerprint: str
    """Identity of the model version, from samples of its files."""
    content: str = ""
    """Identity of the model version, from digests of its files; empty if they were not hashed."""
    chip: str = ""
    system: str = ""
    """Operating system of the node, with its version."""
    software: str = ""
    """Version of Macpool on the node, which determines the version of MLX."""
    measured: float
    """End of the measurement, in Unix seconds."""
    max_prompt: int
    """Maximum tokens of prompt and answer together, limited by the idle node's memory and the model's context."""
    runs: tuple[BenchmarkRun, ...]
    """Measurements, one for each prompt length and number of parallel requests."""

    @property
    def key(self) -> tuple[str, ...]:
        """Identity of the measured setup: a newer record with the same key replaces this one."""
        return self.node, self.model, self.fingerprint, self.system, self.software

    def to_row(self) -> dict[str, object]:
        """Return the record as a row of the API, without the node."""
        return {
            "model": self.model,
            "fingerprint": self.fingerprint,
            "content": self.content,
            "chip": self.chip,
            "system": self.system,
            "software": self.software,
            "measured": self.measured,
            "max_prompt": self.max_prompt,
            "runs": [msgspec.structs.asdict(run) for run in self.runs],
        }


class BenchmarkRecords:
    """Records of benchmarks in the state folder `state`. A file that cannot be read is logged and counts as empty."""

    def __init__(self, state: Path) -> None:
        self._file = state / "benchmarks.json"
        self._records: Mapping[tuple[str, ...], BenchmarkRecord] = {record.key: record for record in self._load()}

    def _load(self) -> list[BenchmarkRecord]:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=list[BenchmarkRecord])
        except FileNotFoundError:
            return []
        except (OSError, msgspec.DecodeError) as error:
            log.warning("benchmarks unreadable", file=str(self._file), why=str(error)[:200])
            return []

    def list_all(self) -> list[BenchmarkRecord]:
        """Return all records, newest first."""
        return sorted(self._records.values(), key=lambda record: record.measured, reverse=True)

    def find(self, node: NodeId, model: str, fingerprint: str) -> BenchmarkRecord | None:
        """Return the newest record of a model version on a node; None if there is none."""
        wanted = (node, model, fingerprint)
        return next(
            (record for record in self.list_all() if (record.node, record.model, record.fingerprint) == wanted), None
        )

    def store(self, record: BenchmarkRecord) -> None:
        """Store a record in place of an earlier one with the same key. Delete the oldest records above `MAX_RECORDS`.

        Raise `OSError`, without any change of the records, if the file cannot be written.
        """
        records = {**self._records, record.key: record}
        newest = sorted(records.values(), key=lambda entry: entry.measured, reverse=True)[:MAX_RECORDS]
        write_private(self._file, msgspec.json.encode(newest))
        self._records = {entry.key: entry for entry in newest}
