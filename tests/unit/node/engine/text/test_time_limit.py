"""The clock of time limits keeps no removed and no expired deadline."""

import gc
import threading
import time
import weakref

from node.engine.text.time_limit import Deadline, DeadlineClock


def work_for(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.001)


def test_a_deadline_that_is_over_is_not_kept() -> None:
    deadline = Deadline(600.0, "too slow")
    with deadline:
        work_for(0.0)
    seen = weakref.ref(deadline)
    del deadline
    gc.collect()
    assert seen() is None


def test_an_expired_deadline_is_expired_once_and_removed_ones_never() -> None:
    class Counted(Deadline):
        count = 0
        expired = threading.Event()

        def expire(self) -> None:
            Counted.count += 1
            self.expired.set()

    clock = DeadlineClock()
    removed, expired = Counted(0.0, ""), Counted(0.0, "")
    clock.add(removed, time.monotonic() + 600.0)
    clock.remove(removed)
    clock.remove(removed)
    clock.add(expired, time.monotonic() - 1.0)
    assert Counted.expired.wait(10.0)
    work_for(0.1)
    assert Counted.count == 1
