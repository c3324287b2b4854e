"""Number of drawn cases: CI draws a part of them, a new part each day; `make nightly` draws all.

The seed of a day is `SEED`: its date, or the environment's `HYPOTHESIS_SEED`.
"""

import os
from collections.abc import Sequence
from datetime import date
from typing import TypeVar

SEED = int(os.environ.get("HYPOTHESIS_SEED") or f"{date.today():%Y%m%d}")
IS_NIGHTLY = bool(os.environ.get("MACPOOL_NIGHTLY"))
CI_SHARE = 5
"""Examples of a property test in the nightly run for each one in CI."""

Case = TypeVar("Case")


def scale_examples(nightly: int) -> int:
    """Return the number of examples of a property test whose nightly run has `nightly` examples."""
    return nightly if IS_NIGHTLY else nightly // CI_SHARE


def thin_cases(
    cases: Sequence[Case], step: int, *, kept: int = 0, seed: int = SEED, is_nightly: bool = IS_NIGHTLY
) -> Sequence[Case]:
    """Return the first `kept` cases and every `step`-th of the rest, a different part with each seed.

    The nightly run has all cases.
    """
    return cases if is_nightly else [*cases[:kept], *cases[kept:][seed % step :: step]]
