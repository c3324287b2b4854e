"""Which of two coordinators of one cluster counts: that of the higher generation.

A restored backup has a higher generation than what it was made of. Nodes are told it with Welcome, signed by the CA,
and show the highest that they have seen in Hello. A coordinator that is shown a higher one than its own, with a
signature that only a coordinator of this cluster can have made, is not the one any more: it notes so in its state
folder, ends, and does not start again there. A node that lies has no such signature, and is turned away.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from coordinator.tls.cluster_ca import Authority
from host.private_files import write_private

MARK = "superseded.json"


class SupersededError(Exception):
    """Another coordinator serves this cluster now; the text says since when and what to do."""


class Mark(msgspec.Struct, frozen=True):
    """The file: the generation that was shown, its signature, by which node, when (Unix seconds)."""

    generation: int
    seal: bytes
    node: str = ""
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Fence:
    """One coordinator's view of it: the authority that signs, and its own generation."""

    authority: Authority
    generation: int

    def newer(self, generation: int, seal: bytes) -> bool:
        """Say whether this proves a coordinator that counts more than we do."""
        return generation > self.generation and self.authority.sealed(generation, seal)

    def check(self, state: Path) -> None:
        """SupersededError where it was written down that we are not the one, and that is proved still: a restore makes
        us newer again."""
        try:
            mark = msgspec.json.decode((state / MARK).read_bytes(), type=Mark)
        except (FileNotFoundError, msgspec.MsgspecError):
            return
        if self.newer(mark.generation, mark.seal):
            raise SupersededError(moved_on(mark, state))


def note(state: Path, mark: Mark) -> None:
    """Write down that we are not the one any more. OSError when that is not possible."""
    write_private(state / MARK, msgspec.json.encode(mark))


def moved_on(mark: Mark, state: Path) -> str:
    """Say that the cluster moved on, and what can be done here."""
    by = f" (node {mark.node} said so)" if mark.node else ""
    return (
        f"this cluster moved on: a backup of it was restored elsewhere, and that coordinator counts now{by}. Remove "
        f"{state} if this machine is not needed for it; to move the cluster back here, make a backup there and "
        "`cluster restore FILE --replace` it here"
    )
