"""Usage of API keys in the database."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.state.database import Database
from coordinator.state.store_errors import StoreError
from coordinator.state.usage_history import CONFIRMING_DAYS, USAGE_DAYS, UsageHistory
from router.admission.api_keys import KeyRing
from router.admission.usage import UsageCounter

DAY = 86_400.0


class Days:
    """A clock that a test sets, and a history that uses it."""

    def __init__(self, store: Database) -> None:
        self.now = 100.5 * DAY
        self.history = UsageHistory(store, KeyRing(b"p" * 32), lambda: self.now)

    def record(self, key: str, prompt: int) -> None:
        counter = UsageCounter()
        counter.get_totals(key, "tiny").count(prompt, 0, 1, failed=False)
        self.history.record(counter)

    def list_tokens(self, **query: Any) -> list[tuple[str, str | None, int]]:
        rows = self.history.sum(**query)["usage"]
        return [(row["key"], row.get("day"), row["prompt_tokens"]) for row in rows]


@pytest.fixture
def days(tmp_path: Path) -> Iterator[Days]:
    store = Database(tmp_path)
    store.create_cluster("c", "lab")
    yield Days(store)
    store.close()


def test_sum_adds_the_days_of_each_key_and_selects_by_key_and_day(days: Days) -> None:
    days.record("a", 10)
    days.now += DAY
    days.record("a", 20)
    days.record("b", 5)
    assert days.list_tokens() == [("a", None, 30), ("b", None, 5)]
    assert days.list_tokens(key="a", daily=True) == [("a", "1970-04-11", 10), ("a", "1970-04-12", 20)]
    assert days.list_tokens(since="1970-04-12") == [("a", None, 20), ("b", None, 5)]
    assert [days.history.sum(since=day)["since"] for day in ("", "1970-04-12")] == [None, "1970-04-12"]


@pytest.mark.parametrize(("later", "expected"), [(USAGE_DAYS, 10 + CONFIRMING_DAYS), (USAGE_DAYS + 1, CONFIRMING_DAYS)])
def test_record_deletes_days_older_than_the_limit(days: Days, later: int, expected: int) -> None:
    days.record("a", 10)
    days.now += (later - CONFIRMING_DAYS + 1) * DAY
    for _ in range(CONFIRMING_DAYS):
        days.record("a", 1)
        days.now += DAY
    assert days.list_tokens() == [("a", None, expected)]


def test_clock_that_is_ahead_for_some_days_deletes_no_usage(days: Days) -> None:
    days.record("a", 10)
    days.now += 2000 * DAY
    for _ in range(CONFIRMING_DAYS - 1):
        days.record("a", 1)
        days.record("b", 1)
        days.now += DAY
    days.now -= 2000 * DAY
    days.record("a", 20)
    assert days.list_tokens() == [("a", None, 30 + CONFIRMING_DAYS - 1), ("b", None, CONFIRMING_DAYS - 1)]


async def test_record_keeps_the_counts_in_the_sums_if_they_cannot_be_written(tmp_path: Path) -> None:
    store = Database(tmp_path)
    other = sqlite3.connect(tmp_path / "cluster.db")
    other.execute("DROP TABLE audit")
    other.close()
    store.audit.add(1.0, "person", "create keys", "laptop")
    with pytest.raises(StoreError):
        await store.flush()
    days, counter = Days(store), UsageCounter()
    for key in ("a", "b"):
        counter.get_totals(key, "tiny").count(10, 0, 1, failed=False)
    with pytest.raises(StoreError):
        days.history.record(counter)
    assert days.list_tokens() == [("a", None, 10), ("b", None, 10)]
    with pytest.raises(StoreError):
        store.close()
