"""What a running node tells of its settings, and who believes it when."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from machine.private import private_folder
from node.run import OTHERS
from node.running import FILE, running, telling
from node.settings import resolve

SETTINGS = resolve([("config.toml", {"memory.cap": "9GiB", "models.preload": ["a"]}),
                    ("--set", {"node.share_battery": "40"})])  # fmt: skip


@contextlib.contextmanager
def process(*words: str) -> Iterator[int]:
    """Give the number of a process that waits, with these words on its command line."""
    with subprocess.Popen([sys.executable, "-c", "input()", *words], stdin=subprocess.PIPE) as started:
        yield started.pid
        started.communicate(b"\n")


def test_a_running_node_tells_its_settings_and_where_they_come_from(tmp_path: Path) -> None:
    folder = private_folder(tmp_path / "node")
    with process("-m", "node.run") as pid:
        assert running(folder, OTHERS) is None
        with telling(folder, pid, SETTINGS):
            found = running(folder, OTHERS)
            assert (folder / FILE).stat().st_mode & 0o777 == 0o600
        assert running(folder, OTHERS) is None
    assert found == SETTINGS
    assert found.value.memory.tier == "custom"


def test_who_is_no_node_or_was_copied_here_is_not_believed(tmp_path: Path) -> None:
    folder = private_folder(tmp_path / "node")
    with process("something") as other, process("node.run") as pid:
        with telling(folder, other, SETTINGS):
            assert running(folder, OTHERS) is None
        with telling(folder, pid, SETTINGS):
            shutil.copytree(folder, tmp_path / "copy")
            assert running(tmp_path / "copy", OTHERS) is None
            assert running(folder, OTHERS)
            left = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(left)
    assert running(folder, OTHERS) is None, "its process has ended"


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff", b'{"pid": "x", "folder": "", "settings": {}}'])
def test_what_is_damaged_is_not_believed(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    assert running(tmp_path, OTHERS) is None


def test_a_node_starts_where_nothing_can_be_told(tmp_path: Path) -> None:
    with telling(tmp_path / "nowhere", os.getpid(), SETTINGS):
        assert not (tmp_path / "nowhere").exists()
