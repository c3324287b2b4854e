"""The published settings of a running node, and when readers trust them."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Generator
from pathlib import Path

import pytest

from host.private_files import create_private_folder
from node.inspect.running_settings import FILE, publish_settings, read_running_settings
from node.settings import COORDINATOR_SECTIONS, resolve_settings

SETTINGS = resolve_settings(
    [("config.toml", {"memory.cap": "9GiB", "models.preload": ["a"]}), ("--set", {"sharing.min_battery_percent": "40"})]
)


@contextlib.contextmanager
def locked(folder: Path, pid: int = 7) -> Generator[None]:
    """Hold a node's lock, as `node.run` does."""
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.write(f"{pid}\n")
        file.flush()
        yield


def test_a_running_node_publishes_its_settings_with_their_sources(tmp_path: Path) -> None:
    folder = create_private_folder(tmp_path / "node")
    assert read_running_settings(folder, COORDINATOR_SECTIONS) is None
    with locked(folder):
        assert read_running_settings(folder, COORDINATOR_SECTIONS) is None
        with publish_settings(folder, 7, SETTINGS):
            found = read_running_settings(folder, COORDINATOR_SECTIONS)
            assert (folder / FILE).stat().st_mode & 0o777 == 0o600
        assert read_running_settings(folder, COORDINATOR_SECTIONS) is None
    assert found == SETTINGS
    assert found is not None
    assert found.value.memory.tier == "custom"


def test_a_killed_nodes_or_copied_state_is_not_used(tmp_path: Path) -> None:
    folder = create_private_folder(tmp_path / "node")
    with locked(folder), publish_settings(folder, 7, SETTINGS):
        shutil.copytree(folder, tmp_path / "copy")
        assert read_running_settings(tmp_path / "copy", COORDINATOR_SECTIONS) is None
        left = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(left)
    assert read_running_settings(folder, COORDINATOR_SECTIONS) is None, "its process has ended"
    with locked(folder, 8):
        assert read_running_settings(folder, COORDINATOR_SECTIONS) is None, (
            "another process runs, and has not written its settings yet"
        )


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff", b'{"pid": "x", "settings": {}}'])
def test_a_damaged_file_is_ignored(tmp_path: Path, content: bytes) -> None:
    with locked(tmp_path):
        (tmp_path / FILE).write_bytes(content)
        assert read_running_settings(tmp_path, COORDINATOR_SECTIONS) is None


def test_a_node_starts_if_its_settings_cannot_be_published(tmp_path: Path) -> None:
    with publish_settings(tmp_path / "nowhere", os.getpid(), SETTINGS):
        assert not (tmp_path / "nowhere").exists()
