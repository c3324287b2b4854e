"""Mark of a node that left its cluster on purpose. The coordinator on the same Mac does not restart that node."""

from pathlib import Path


def mark_left(node: Path) -> None:
    """Write the mark for the node of this folder. Raises OSError."""
    (node / "left").touch(mode=0o600)


def has_left(node: Path) -> bool:
    """Return whether the node of this folder left and has not joined again."""
    return (node / "left").exists()


def forget_left(node: Path) -> None:
    """Remove the mark when the node joins or a person restores it."""
    (node / "left").unlink(missing_ok=True)
