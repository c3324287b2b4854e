"""Decides which of two coordinators of one cluster is valid: the one with the higher generation.

A restored backup has a higher generation than its source. Nodes receive the generation in Welcome, signed by the CA,
and send the highest seen generation in Hello. If a coordinator receives a higher generation with a valid signature, it
is superseded. It records this in its state folder, stops, and does not start there again. Only a coordinator of this
cluster can make the signature, and a node without it is denied.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from coordinator.tls.cluster_ca import ClusterCa
from host.private_files import write_private

MARK_FILE = "superseded.json"


class SupersededError(Exception):
    """Another coordinator serves this cluster now. The text has the next steps."""


class SupersededMark(msgspec.Struct, frozen=True):
    """Record of a superseding generation: number, signature, node that sent it, time (Unix seconds)."""

    generation: int
    seal: bytes
    node: str = ""
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class GenerationFence:
    """Fence of one coordinator: the authority that signs, and the coordinator's generation."""

    authority: ClusterCa
    generation: int

    def is_newer(self, generation: int, seal: bytes) -> bool:
        """Return whether this proves a coordinator with a higher generation."""
        return generation > self.generation and self.authority.sealed(generation, seal)

    def check(self, state: Path) -> None:
        """Raise `SupersededError` if a record exists and is still valid. A restore raises the generation above the
        record."""
        try:
            mark = msgspec.json.decode((state / MARK_FILE).read_bytes(), type=SupersededMark)
        except (FileNotFoundError, msgspec.MsgspecError):
            return
        if self.is_newer(mark.generation, mark.seal):
            raise SupersededError(moved_message(mark, state))


def record_superseded(state: Path, mark: SupersededMark) -> None:
    """Record that this coordinator is superseded. Raise `OSError` if the write fails."""
    write_private(state / MARK_FILE, msgspec.json.encode(mark))


def moved_message(mark: SupersededMark, state: Path) -> str:
    """Return the message that the cluster has moved, with the next steps."""
    by = f" (reported by node {mark.node})" if mark.node else ""
    return (
        f"this cluster has moved: a backup of it was restored elsewhere, and that coordinator is valid now{by}. Remove "
        f"{state} if this machine is not needed for it; to move the cluster back here, make a backup there and "
        "`cluster restore FILE --replace` it here"
    )
