"""Free disk space for downloads, and the reserve that stays free."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from node.hub.download.disk_space import DiskSpace, compute_reserve
from node.hub.errors import ModelFileError
from wire.frames.model_files import ModelOrderCode
from wire.units import GIB, show_size


@pytest.mark.parametrize(
    ("total", "wanted", "reserve"),
    [
        (1000 * GIB, -1, 5 * GIB),
        (100 * GIB, -1, 5 * GIB),
        (20 * GIB, -1, GIB),
        (20 * GIB, 0, 0),
        (20 * GIB, 7 * GIB, 7 * GIB),
    ],
)
def test_the_default_reserve_is_5_gib_and_at_most_a_twentieth_of_the_disk(total: int, wanted: int, reserve: int):
    assert compute_reserve(total, wanted) == reserve


def test_check_refuses_what_would_use_the_reserve(tmp_path: Path):
    usage = shutil.disk_usage(tmp_path)
    slack = usage.free // 4  # other processes use this disk as well
    reserve = usage.free // 2
    disk = DiskSpace(tmp_path, reserve, "the quantized model")
    disk.check(0)
    disk.check(usage.free - reserve - slack)
    needed = usage.free - reserve + slack
    with pytest.raises(ModelFileError) as caught:
        disk.check(needed)
    assert caught.value.code == ModelOrderCode.DISK_FULL
    assert f" free and keeps {show_size(reserve)}, and the quantized model needs {show_size(needed)} more" in str(
        caught.value
    )
    assert str(tmp_path) in str(caught.value)


def test_the_refusal_names_the_free_bytes_of_the_disk_and_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    usage = SimpleNamespace(disk_usage=lambda folder: SimpleNamespace(total=400 * GIB, used=388 * GIB, free=12 * GIB))
    monkeypatch.setattr("node.hub.download.disk_space.shutil", usage)
    disk = DiskSpace(tmp_path, -1)
    disk.check(7 * GIB)
    with pytest.raises(ModelFileError) as caught:
        disk.check(7 * GIB + 1)
    assert str(caught.value) == (
        f"the disk of {tmp_path} has 12.0 GiB free and keeps 5.0 GiB, and the download needs 7.0 GiB more: remove "
        "files or models"
    )


def test_check_fails_for_a_folder_that_is_missing(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        DiskSpace(tmp_path / "missing", 0).check(0)
