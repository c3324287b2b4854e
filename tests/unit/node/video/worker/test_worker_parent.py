"""The parent of a worker in this process, with a program that ends at once as its worker.

`tests/e2e/video` has the parent in its own process, with a real worker.
"""

import os
import shutil
import threading
from pathlib import Path

import msgspec

from node.video.worker.lease_files import CLAIM, GRANT, GUARD, SCRATCH, LeaseGrant, lock_file
from node.video.worker.worker_parent import WorkerParent
from tests.support.processes import until

WAIT = 10.0


def test_a_parent_whose_lease_ends_before_the_agent_has_seen_its_worker_ends_at_once(tmp_path: Path):
    (tmp_path / SCRATCH).mkdir()
    guard = lock_file(tmp_path / GUARD)
    assert guard is not None
    program = shutil.which("true")
    assert program is not None
    grant = LeaseGrant(lease="l-1", generation=1, size=1, python=program, environment={}, job={})
    (tmp_path / GRANT).write_bytes(msgspec.json.encode(grant))
    parent, codes = WorkerParent(tmp_path, "l-1", 1), list[int]()
    running = threading.Thread(target=lambda: codes.append(parent.run()), daemon=True)
    running.start()
    try:
        until((tmp_path / CLAIM).exists, WAIT)
        (tmp_path / GRANT).unlink()
        running.join(WAIT)
        assert codes == [0]
    finally:
        parent.stop()
        os.close(guard)
