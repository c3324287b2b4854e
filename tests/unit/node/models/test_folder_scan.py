"""Scans of folders that answer late, again, or not at all."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from node.engine.models.model_descriptor import ModelDescriptor
from node.models.folder_scan import UNREADABLE_SECONDS, FolderScan, scan_places

WAIT = 30.0


def describe(*names: str, folder: str = "/a") -> dict[str, ModelDescriptor]:
    return {name: ModelDescriptor(name, Path(folder)) for name in names}


class Disk:
    """A folder whose answers a test gives, and a clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.answers: Callable[[], Mapping[str, ModelDescriptor]] = describe
        self.may = threading.Event()
        self.may.set()
        self.scan = FolderScan("/a", self._read, lambda: self.now)

    def _read(self) -> Mapping[str, ModelDescriptor]:
        answers = self.answers
        assert self.may.wait(WAIT)
        return answers()


def test_a_scan_that_runs_is_not_begun_again_and_its_folder_is_unreadable_after_a_time():
    disk = Disk()
    assert disk.scan.get_models() == {}
    disk.answers = lambda: describe("m")
    assert scan_places([disk.scan], WAIT) == describe("m")
    disk.answers = lambda: describe("m", "n")
    disk.may.clear()
    call = disk.scan.begin()
    assert call is not None
    disk.now += UNREADABLE_SECONDS - 1
    assert disk.scan.begin() is None, "the caller waits for no scan that has begun earlier"
    assert disk.scan.get_models() == describe("m")
    disk.now += 1
    (found,) = disk.scan.get_models().values()
    assert found.cause == "/a does not answer: check its disk, or its network mount"
    disk.may.set()
    call.result(WAIT)
    assert disk.scan.get_models() == describe("m", "n")
    disk.now += 10 * UNREADABLE_SECONDS
    assert disk.scan.get_models() == describe("m", "n"), "the last scan has ended"


def test_of_equal_names_the_model_of_the_first_folder_counts_and_a_failed_scan_raises():
    first, second = Disk(), Disk()
    first.answers, second.answers = lambda: describe("m"), lambda: describe("m", "n", folder="/b")
    assert scan_places([first.scan, second.scan], WAIT) == describe("m") | describe("n", folder="/b")

    def fail() -> Mapping[str, ModelDescriptor]:
        raise OSError("stale file handle")

    second.answers = fail
    with pytest.raises(OSError, match="stale"):
        scan_places([first.scan, second.scan], WAIT)
