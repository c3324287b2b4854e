"""Files that only their owner may read, with any umask and any existing file at the path."""

import fcntl
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from host import private_files
from host.private_files import create_private_folder, sync_descriptor, sync_tree, write_private
from tests.support.coordinator.sync_log import SyncLog


@pytest.fixture(autouse=True)
def generous() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_folders_are_private_with_all_that_is_made_above_them(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    made = create_private_folder(tmp_path / "a" / "b" / "c")
    assert [mode(one) for one in (made, made.parent, made.parent.parent)] == [0o700] * 3
    assert mode(tmp_path) == 0o755, "the mode of an existing folder is kept"
    made.chmod(0o755)
    assert mode(create_private_folder(made)) == 0o700


def test_a_file_is_private_and_follows_no_link(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (tmp_path / "file").symlink_to(mine)
    write_private(tmp_path / "file", b"secret")
    assert mode(tmp_path / "file") == 0o600
    assert not (tmp_path / "file").is_symlink()
    assert mine.read_text() == "mine"
    (tmp_path / f"file.{os.getpid()}.new").symlink_to(mine)
    with pytest.raises(OSError, match="symbolic links"):
        write_private(tmp_path / "file", b"other")
    assert mine.read_text() == "mine"


def test_a_file_that_an_interrupted_write_left_is_narrowed_and_replaced_whole(tmp_path: Path) -> None:
    beside = tmp_path / f"file.{os.getpid()}.new"
    beside.write_bytes(b"longer than what follows")
    beside.chmod(0o644)
    opened = len(os.listdir("/dev/fd"))
    write_private(tmp_path / "file", b"secret")
    assert ((tmp_path / "file").read_bytes(), mode(tmp_path / "file")) == (b"secret", 0o600)
    assert not beside.exists()
    assert len(os.listdir("/dev/fd")) == opened


def test_a_file_in_the_way_of_a_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    with pytest.raises(OSError, match=r"exists|Not a directory"):
        create_private_folder(tmp_path / "state" / "node")


def test_a_failed_write_leaves_no_file_beside(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(IsADirectoryError):
        write_private(tmp_path / "file", b"secret")
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_a_tree_is_written_to_the_disk_with_its_subfolders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    files = [tmp_path / "one", tmp_path / "a/two", tmp_path / "a/b/three"]
    for file in files:
        file.write_text("x")
    synced: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor)[1:3]))
    sync_tree(tmp_path)
    expected = [path.stat()[1:3] for path in (*files, tmp_path, tmp_path / "a", tmp_path / "a/b")]
    assert sorted(synced) == sorted(expected)
    assert synced[-1] == tmp_path.stat()[1:3], "a folder follows its entries"


def test_a_file_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs = SyncLog(monkeypatch)
    write_private(tmp_path / "file", b"secret")
    assert (syncs.unsynced_content, syncs.unsynced_folders) == ([], [])


@pytest.mark.parametrize("works", [True, False])
def test_macos_writes_to_the_medium_where_the_disk_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    calls: list[str] = []

    def control(descriptor: int, operation: int) -> int:
        calls.append(f"fcntl {operation}")
        if not works:
            raise OSError(45, "Operation not supported")
        return descriptor

    monkeypatch.setattr(private_files, "FULL_SYNC", 51)
    monkeypatch.setattr(fcntl, "fcntl", control)
    monkeypatch.setattr(os, "fsync", lambda _: calls.append("fsync"))
    with (tmp_path / "file").open("w") as file:
        sync_descriptor(file.fileno())
    assert calls == (["fcntl 51"] if works else ["fcntl 51", "fsync"])


def test_closed_streams_are_opened_before_another_file_gets_their_numbers(tmp_path: Path) -> None:
    file = tmp_path / "file"
    code = (
        "import sys; from host.private_files import open_missing_streams; open_missing_streams();"
        f"file = open({str(file)!r}, 'w'); print('out', flush=True); print('err', file=sys.stderr);"
        "file.write(f'{file.fileno()} {sys.stdin.read()!r}')"
    )
    subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code], check=True)
    assert file.read_text() == "3 ''"
