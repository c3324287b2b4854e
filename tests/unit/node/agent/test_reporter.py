"""Parts of a node's report."""

import shutil
from pathlib import Path

from node.agent.reporter import measure_disk


def test_measure_disk_reads_the_disk_of_a_folder_that_does_not_exist_yet(tmp_path: Path) -> None:
    disk = measure_disk(tmp_path / "cache" / "hub")
    usage = shutil.disk_usage(tmp_path)
    assert disk.total == usage.total
    assert abs(disk.free - usage.free) < 1 << 30
    assert disk.folder == str(tmp_path / "cache" / "hub")
