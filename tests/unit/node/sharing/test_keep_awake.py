import sys

import pytest

from host.sleep_inhibitor import SleepInhibitor
from node.sharing.keep_awake import LINGER_SECONDS, SleepPolicy


@pytest.mark.parametrize(
    ("rule", "held"),
    [("busy", [False, True, True, False]), ("always", [True] * 4), ("never", [False] * 4)],
)
def test_a_mac_stays_awake_for_its_work(rule: str, held: list[bool]):
    now, busy = [1000.0], [False]
    awake = SleepInhibitor((sys.executable, "-IS", "-c", "import time, sys; time.sleep(60)"))
    wakeful = SleepPolicy(rule, lambda: busy[0], lambda: now[0], awake)
    seen: list[bool] = []
    for after, works in ((0.0, False), (10.0, True), (LINGER_SECONDS - 1, False), (2.0, False)):
        now[0] += after
        busy[0] = works
        wakeful.update()
        seen.append(awake.held)
    wakeful.stop()
    assert seen == held
    assert not awake.held


def test_a_mac_may_sleep_before_its_first_work_and_a_minute_after_its_last():
    now, busy = [0.0], [True]
    awake = SleepInhibitor((sys.executable, "-IS", "-c", "import time; time.sleep(60)"))
    wakeful = SleepPolicy("busy", lambda: busy[0], lambda: now[0], awake)
    for at, works, held in (
        (0.0, False, False),
        (0.0, True, True),
        (30.0, True, True),
        (30.5, False, True),
        (89.9, False, True),
        (90.0, False, False),
        (91.0, True, True),
    ):
        now[0], busy[0] = at, works
        wakeful.update()
        assert awake.held is held, at
    wakeful.stop()
    assert not awake.held
