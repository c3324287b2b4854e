"""Refusals: status and code as the documentation has them, and which of them are retried."""

import re
from pathlib import Path

import pytest

from wire.refusals import MemoryNumbers, RefusalCode, Refused

ERRORS = Path(__file__).parents[3] / "docs" / "errors.md"
RETRIED = (429, 503)


def read_documented_statuses() -> dict[str, int]:
    """Return the HTTP status of each code of a refusal, from the first table of docs/errors.md."""
    section = ERRORS.read_text().split("## Refusals")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\d{3}) \| ([^|]+) \|", section, re.MULTILINE)
    return {code: int(status) for status, codes in rows for code in re.findall(r"`(\w+)`", codes)}


@pytest.mark.parametrize("code", RefusalCode)
def test_a_refusal_has_the_documented_status_and_only_a_busy_cluster_is_retried(code: RefusalCode) -> None:
    refused = Refused(code, "text")
    assert refused.status == read_documented_statuses()[code.value]
    assert refused.final is (refused.status not in RETRIED)


def test_the_headroom_of_a_refusal_is_unknown_unless_it_was_measured() -> None:
    numbers = MemoryNumbers()
    assert (numbers.predicted, numbers.current, numbers.headroom) == (None, None, None)
    assert (numbers.ceiling, numbers.reserved, numbers.estimate, numbers.margin, numbers.cap) == (0, 0, 0, 0, 0)
