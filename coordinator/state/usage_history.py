"""Usage of API keys by day and model in the database: storage, deletion after `USAGE_DAYS` days, and sums."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import msgspec

from coordinator.state.database import Database
from coordinator.state.rows import UsageRow
from coordinator.state.store_errors import StoreError
from router.admission.api_keys import KeyRing
from router.admission.usage import UsageCounter, UsageTotals

USAGE_DAYS = 400
"""Days for which usage is stored. Older usage is deleted."""
CONFIRMING_DAYS = 7
"""Minimum number of days with usage, among the last `USAGE_DAYS` days, before older usage is deleted.

A clock that is ahead for a short time therefore deletes nothing.
"""


@dataclass(frozen=True, slots=True)
class UsageHistory:
    """Usage of API keys in the database.

    `ring` has the names of keys that are not stored. `clock` returns Unix seconds.
    """

    store: Database
    ring: KeyRing
    clock: Callable[[], float]

    def record(self, usage: UsageCounter) -> None:
        """Move the counts of `usage` into the database, and delete usage older than `USAGE_DAYS` days.

        Nothing is deleted until at least `CONFIRMING_DAYS` of the later days have usage. Raise `StoreError` while
        changes cannot be written. The sums then have the counts, which wait for the disk.
        """
        today = datetime.fromtimestamp(self.clock(), UTC).date()
        failure: StoreError | None = None
        for (key, model), used in usage.drain().items():
            try:
                self.store.usage.add(key, model, today.isoformat(), used)
            except StoreError as error:
                failure = error
        if failure is not None:
            raise failure
        self.store.usage.delete_before((today - timedelta(days=USAGE_DAYS)).isoformat(), CONFIRMING_DAYS)

    def sum(self, key: str | None = None, since: str = "", *, daily: bool = False) -> dict[str, Any]:
        """Return the body of `/api/v1/keys/usage`: requests and tokens by key and model, with `daily` also by day.

        `since` is the first day (UTC), such as `2026-01-31`; empty for all days. `key` is the id of the only key; None
        for all keys. Without `daily`, the days are added up.
        """
        return self.prepare_sum(key, since, daily=daily)()

    def prepare_sum(
        self, key: str | None = None, since: str = "", *, daily: bool = False
    ) -> Callable[[], dict[str, Any]]:
        """Return a function that returns the result of `sum` with these arguments, over the rows that exist now.

        The function may run in any thread, because a year of many keys takes more than a second. It includes usage that
        is added to these rows before it runs.
        """
        names = {**self.ring.get_names(), **{row.id: row.name for row in self.store.keys.values()}}
        return partial(_sum_rows, self.store.usage.list_rows(), names, key, since, daily=daily)


def _sum_rows(
    stored: Iterable[UsageRow], names: Mapping[str, str], key: str | None, since: str, *, daily: bool
) -> dict[str, Any]:
    days: dict[str, dict[tuple[str, str], UsageTotals]] = {}
    for row in stored:
        if row.day >= since and key in (None, row.key):
            sums = days.setdefault(row.day if daily else "", {})
            sums.setdefault((row.key, row.model), UsageTotals()).add(row.used)
    rows = [
        {
            "key": key_id,
            "name": names.get(key_id, ""),
            "model": model,
            **({"day": day} if daily else {}),
            **msgspec.structs.asdict(used),
        }
        for day, sums in sorted(days.items())
        for (key_id, model), used in sorted(sums.items())
    ]
    return {"schema": 1, "since": since or None, "usage": rows}
