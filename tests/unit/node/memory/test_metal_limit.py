"""The figure that is kept on disk, and every case in which the figure belongs to another machine or limit."""

import json
import os
import stat
from pathlib import Path

import pytest
import structlog
from msgspec.structs import replace

from node.memory.cap import MetalDevice
from node.memory.metal_limit import FILE, read_metal_device, write_device
from wire.report import Hardware
from wire.units import GIB

MAC = Hardware("Apple M5 Max", 128 * GIB, 18, "macOS 26.4", "3.12.1")
FIGURE = MetalDevice(107 * GIB)
SET = 112 * GIB


def test_a_figure_is_found_again_only_by_the_machine_that_it_belongs_to(tmp_path: Path):
    folder = tmp_path / "node"
    assert read_metal_device(folder, MAC, None) is None
    write_device(folder, MAC, FIGURE)
    assert stat.S_IMODE((folder / FILE).stat().st_mode) == 0o600
    assert read_metal_device(folder, MAC, None) == FIGURE
    assert read_metal_device(folder, replace(MAC, cores=12, python="3.13.0"), None) == FIGURE, "these decide nothing"
    for other in (
        replace(MAC, chip="Apple M4 Max"),
        replace(MAC, memory=64 * GIB),
        replace(MAC, system="macOS 26.5"),
    ):
        assert read_metal_device(folder, other, None) is None
    assert read_metal_device(folder, MAC, SET) is None, "another limit is set by now"


def test_a_figure_under_a_set_limit_belongs_to_that_limit(tmp_path: Path):
    write_device(tmp_path, MAC, MetalDevice(SET, SET))
    assert read_metal_device(tmp_path, MAC, SET) == MetalDevice(SET, SET)
    assert read_metal_device(tmp_path, MAC, None) is None
    assert read_metal_device(tmp_path, MAC, SET - 1) is None


@pytest.mark.parametrize("change", [{"limit": 0}, {"limit": -1}, {"limit": "much"}, {"more": 1}, {"wired": 0}])
def test_a_file_with_other_values_is_ignored(tmp_path: Path, change: dict[str, object]):
    write_device(tmp_path, MAC, FIGURE)
    kept = json.loads((tmp_path / FILE).read_text())
    (tmp_path / FILE).write_text(json.dumps(kept | change))
    assert read_metal_device(tmp_path, MAC, None) is None


@pytest.mark.parametrize("content", [b"", b"{", b"null", b"\xff", b"[]"])
def test_a_file_that_cannot_be_read_is_ignored(tmp_path: Path, content: bytes):
    (tmp_path / FILE).write_bytes(content)
    assert read_metal_device(tmp_path, MAC, None) is None


def test_a_disk_that_takes_nothing_is_a_warning(tmp_path: Path):
    (tmp_path / "node").write_text("no folder")
    with structlog.testing.capture_logs() as logs:
        write_device(tmp_path / "node", MAC, FIGURE)
    assert [(line["event"], line["log_level"]) for line in logs] == [("metal limit not stored", "warning")]
    assert os.listdir(tmp_path) == ["node"]


def test_the_smallest_figure_is_one(tmp_path: Path):
    write_device(tmp_path, MAC, MetalDevice(1))
    assert read_metal_device(tmp_path, MAC, None) == MetalDevice(1)
