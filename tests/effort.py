"""Number of drawn cases: CI draws a part of them, a new part each day; `make nightly` draws all.

The seed of a day is `SEED`: its date, or the environment's `HYPOTHESIS_SEED`. `deal_slow_modules` orders the tests.
"""

import os
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import TypeVar

SEED = int(os.environ.get("HYPOTHESIS_SEED") or f"{date.today():%Y%m%d}")
IS_NIGHTLY = bool(os.environ.get("MACPOOL_NIGHTLY"))
CI_SHARE = 10
"""Examples of a property test in the nightly run for each one in CI."""
MAX_CI_EXAMPLES = 250
"""Most examples of a property test in CI. The seed of each day draws other ones."""

Case = TypeVar("Case")


def scale_examples(nightly: int) -> int:
    """Return the number of examples of a property test whose nightly run has `nightly` examples."""
    return nightly if IS_NIGHTLY else min(nightly // CI_SHARE, MAX_CI_EXAMPLES)


def thin_cases(
    cases: Sequence[Case], step: int, *, kept: int = 0, seed: int = SEED, is_nightly: bool = IS_NIGHTLY
) -> Sequence[Case]:
    """Return the first `kept` cases and every `step`-th of the rest, a different part with each seed.

    The nightly run has all cases.
    """
    return cases if is_nightly else [*cases[:kept], *cases[kept:][seed % step :: step]]


def deal_slow_modules(
    tests: Sequence[Case], get_module: Callable[[Case], Path], get_limit: Callable[[Case], float], workers: int
) -> list[Case]:
    """Return the tests in an order in which most workers begin with a part of the modules that start processes.

    These modules wait for most of their time. Hence one worker of four begins with the other tests, which compute, and
    uses the core that the waiting workers leave idle.

    `get_limit` returns the time limit of a test that starts processes, in seconds, and 0 for other tests. Modules of
    end-to-end tests come first, because they wait most, then those with the longest limit.

    The scheduler of xdist gives each worker one part of the list. A worker without tests takes from the end of the part
    of another worker. Hence the end of each part has short tests: no worker waits alone for a long one. Modules that
    start processes stay whole, because two workers that share a module start its processes twice. Otherwise the order
    is that of `tests`.
    """
    limits: dict[Path, float] = {}
    for test in tests:
        module = get_module(test)
        limits[module] = max(limits.get(module, 0.0), get_limit(test))
    slow: dict[Path, list[Case]] = {module: [] for module in limits if limits[module]}
    fast = list[Case]()
    for test in tests:
        slow.get(get_module(test), fast).append(test)
    modules = sorted(slow, key=lambda module: ("e2e" not in module.parts, -limits[module]))
    beginners = workers - workers // 4
    dealt, taken = list[Case](), 0
    for worker in range(workers):
        begun = modules[worker::beginners] if worker < beginners else []
        dealt += [test for module in begun for test in slow[module]]
        end = len(tests) * (worker + 1) // workers
        count = max(0, end - len(dealt)) if worker < workers - 1 else len(fast)
        dealt += fast[taken : taken + count]
        taken += count
    return dealt
