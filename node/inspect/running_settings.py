"""Publish the settings of a running node in a file, and read them for `node.inspect.report`.

Only the process itself knows its flags and its environment. A report from files alone could describe another
configuration than the running one. The node therefore writes its non-default settings with their origins to
STATE/node/running.json (mode 0600), and removes the file when it stops. A file that a killed node left behind, or a
copy, is detected because no process holds the lock of the node.
"""

import fcntl
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from host.private_files import write_private
from host.settings_loader import ResolvedSettings, build_setting_rows
from node.settings import NodeSettings, resolve_settings

FILE = "running.json"


class RunningSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of the file: process id of the node, and its settings that are not defaults (value and origin by key)."""

    pid: int
    settings: dict[str, tuple[object, str]]


@contextmanager
def publish_settings(folder: Path, pid: int, resolved: ResolvedSettings[NodeSettings]) -> Generator[None]:
    """Publish the settings of the node with process id `pid` in its folder (STATE/node) while the block runs.

    A write error, such as a full disk, is ignored: the node then runs without published settings.
    """
    set_here = {
        str(row["key"]): (row["value"], str(row["origin"]))
        for row in build_setting_rows(resolved)
        if row["key"] in resolved.origins
    }
    with suppress(OSError):
        write_private(folder / FILE, msgspec.json.encode(RunningSettings(pid, set_here)))
    try:
        yield
    finally:
        with suppress(OSError):
            (folder / FILE).unlink(missing_ok=True)


def read_running_settings(folder: Path, others: frozenset[str]) -> ResolvedSettings[NodeSettings] | None:
    """Return the settings of the node that runs in a folder (STATE/node), with origins. `others` are sections to skip.

    Return None if no node runs there or its settings cannot be read.
    """
    try:
        settings = msgspec.json.decode((folder / FILE).read_bytes(), type=RunningSettings)
        if settings.pid != _find_lock_holder(folder / "lock"):
            return None
        return resolve_settings([(origin, {key: value}) for key, (value, origin) in settings.settings.items()], others)
    except (OSError, ValueError, msgspec.MsgspecError):
        return None


def _find_lock_holder(lock: Path) -> int | None:
    """Return the process that holds a node's lock; None when no process does. The check takes a shared lock briefly."""
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return int(file.read())
    return None
