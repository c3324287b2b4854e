"""Fence between two coordinators of one cluster: only the one with the higher generation is valid.

A restored backup has a higher generation than its source. Nodes receive the generation in Welcome, signed by the CA,
and send the highest seen generation in Hello. A coordinator that receives a higher generation with a valid signature is
superseded. A superseded coordinator records that in its state folder, stops, and does not start there again. Only a
coordinator of this cluster can make the signature. A higher generation without a valid signature is ignored.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from coordinator.tls.cluster_ca import ClusterCa
from host.private_files import write_private

MARK_FILE = "superseded.json"
"""File in the state folder with the `SupersededMark`."""


class SupersededError(Exception):
    """Raised if another coordinator serves this cluster. The text has the next steps."""


class SupersededMark(msgspec.Struct, frozen=True):
    """Record in the state folder that a coordinator with a higher generation exists."""

    generation: int
    """Generation of the other coordinator, higher than this coordinator's own."""
    seal: bytes
    """Signature of `generation` by the CA of the cluster."""
    node: str = ""
    """Node that sent the generation; empty if unknown."""
    at: float = 0.0
    """Time of the record, in Unix seconds."""


@dataclass(frozen=True, slots=True)
class GenerationFence:
    """Check of other coordinators' generations against `generation`, that of this coordinator.

    `authority` verifies the signatures of other generations.
    """

    authority: ClusterCa
    generation: int

    def is_newer(self, generation: int, seal: bytes) -> bool:
        """Return whether a generation is higher than this coordinator's, and `seal` is the CA's signature of it."""
        return generation > self.generation and self.authority.is_sealed(generation, seal)

    def check(self, state: Path) -> None:
        """Raise `SupersededError` if the state folder has a `SupersededMark` with a higher generation.

        A later restore into the folder raises this coordinator's generation, after which the mark has no effect. A mark
        that cannot be parsed, or has no valid signature, is ignored. Raise `OSError` if the mark cannot be read.
        """
        try:
            mark = msgspec.json.decode((state / MARK_FILE).read_bytes(), type=SupersededMark)
        except (FileNotFoundError, msgspec.MsgspecError):
            return
        if self.is_newer(mark.generation, mark.seal):
            raise SupersededError(build_moved_message(mark, state))


def record_superseded(state: Path, mark: SupersededMark) -> None:
    """Write `mark` into the state folder, so that the superseded coordinator does not start there again.

    Raise `OSError` if the write fails.
    """
    write_private(state / MARK_FILE, msgspec.json.encode(mark))


def build_moved_message(mark: SupersededMark, state: Path) -> str:
    """Return the error message, with next steps, of a coordinator that was superseded as `mark` records.

    `state` is its state folder.
    """
    by = f" (reported by node {mark.node})" if mark.node else ""
    return (
        f"this cluster has moved: a backup of it was restored elsewhere, and that coordinator is valid now{by}. Remove "
        f"{state} if this machine is not needed for it; to move the cluster back here, make a backup there and "
        "`cluster restore FILE --replace` it here"
    )
