"""Marker file of a node that left its cluster on purpose. The coordinator on the same Mac does not restart that
node."""

from pathlib import Path


def mark_left(node: Path) -> None:
    """Record that the node with the folder `node` (STATE/node) left its cluster. Raise OSError if that fails."""
    (node / "left").touch(mode=0o600)


def has_left(node: Path) -> bool:
    """Return whether the node with the folder `node` left its cluster, and has not been started or joined again."""
    return (node / "left").exists()


def delete_left_mark(node: Path) -> None:
    """Delete the file of `mark_left`, because the node joins again or is started. Raise OSError if that fails."""
    (node / "left").unlink(missing_ok=True)
