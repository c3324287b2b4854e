"""The settings that a running node uses, told beside its lock to whoever looks at this machine: `node.inspect.report`.

Flags and the environment of a process are known to it alone; what looks at files would judge another node than the one
that runs. So the node writes down what differs from the defaults, with the origin of each, into STATE/node/running.json
(0600; no setting of a node is a secret), and removes it at its end. What a killed node left behind, or somebody copied,
is known by the lock beside it, which nobody holds.
"""

import fcntl
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from host.private_files import write_private
from host.settings_loader import Resolved, explained
from node.settings import NodeSettings, resolve

FILE = "running.json"


class Told(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which process, and its settings that are not defaults: value and origin by key."""

    pid: int
    settings: dict[str, tuple[object, str]]


@contextmanager
def telling(folder: Path, pid: int, resolved: Resolved[NodeSettings]) -> Generator[None]:
    """Tell the settings in a node's folder for as long as the block runs. A disk that takes no more stops no node: then
    nothing is told."""
    set_here = {str(row["key"]): (row["value"], str(row["origin"])) for row in explained(resolved)
                if row["key"] in resolved.origins}  # fmt: skip
    with suppress(OSError):
        write_private(folder / FILE, msgspec.json.encode(Told(pid, set_here)))
    try:
        yield
    finally:
        with suppress(OSError):
            (folder / FILE).unlink(missing_ok=True)


def running(folder: Path, others: frozenset[str]) -> Resolved[NodeSettings] | None:
    """Give the settings of the node that runs in a folder; None where none runs, or they cannot be read."""
    try:
        told = msgspec.json.decode((folder / FILE).read_bytes(), type=Told)
        if told.pid != _holder(folder / "lock"):
            return None
        return resolve([(origin, {key: value}) for key, (value, origin) in told.settings.items()], others)
    except (OSError, ValueError, msgspec.MsgspecError):
        return None


def _holder(lock: Path) -> int | None:
    """Give the process that holds a node's lock; None when nobody does. The look takes a shared lock for a moment."""
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return int(file.read())
    return None
