"""The mark of a node that left its cluster on purpose: the coordinator on that Mac does not start it again unasked."""

from pathlib import Path


def mark_left(node: Path) -> None:
    """Note that the node of this folder left. OSError when it cannot be written."""
    (node / "left").touch(mode=0o600)


def has_left(node: Path) -> bool:
    """Return whether the node of this folder left, and did not join since."""
    return (node / "left").exists()


def forget_left(node: Path) -> None:
    """Remove the mark: the node joins, or a person wants it back."""
    (node / "left").unlink(missing_ok=True)
