"""Tables of the cluster's database: rows in memory and on the disk after each change."""

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from coordinator.models.wishes import Wish
from coordinator.state import tables
from coordinator.state.database import Database
from coordinator.state.rows import MemberRow, TokenRow
from router.admission.usage import UsageTotals
from tests.unit.coordinator.state.test_database import KEY
from wire.identity import NodeId
from wire.report import Hardware


def read(folder: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(folder / "cluster.db")) as connection:
        return connection.execute(query).fetchall()


def test_usage_is_added_for_each_key_model_and_day(tmp_path: Path):
    store = Database(tmp_path)
    added = [("a", "tiny", "2026-01-01"), ("b", "tiny", "2026-01-01"), ("a", "big", "2026-01-01")]
    added += [("a", "tiny", "2026-01-02"), ("a", "tiny", "2026-01-01")]
    for number, row in enumerate(added, 1):
        store.usage.add(*row, UsageTotals(number, 10 * number, 100 * number, 1000 * number, 10_000 * number))
    expected = [(*added[0], 6, 60, 600, 6000, 60_000)]
    expected += [(*row, n, 10 * n, 100 * n, 1000 * n, 10_000 * n) for n, row in enumerate(added[1:4], 2)]
    listed = [(row.key, row.model, row.day, row.used.requests) for row in store.usage.list_rows()]
    store.close()
    assert sorted(read(tmp_path, "SELECT * FROM usage")) == sorted(expected)
    assert sorted(listed) == sorted(row[:4] for row in expected)


@pytest.mark.parametrize(
    ("before", "days", "left"),
    [
        ("2026-01-03", 2, ["2026-01-03", "2026-01-04"]),
        ("2026-01-03", 3, ["2026-01-01", "2026-01-02", "2026-01-03", "2026-01-04"]),
        ("2026-01-01", 1, ["2026-01-01", "2026-01-02", "2026-01-03", "2026-01-04"]),
        ("2026-01-09", 0, []),
        ("2026-01-09", 1, ["2026-01-01", "2026-01-02", "2026-01-03", "2026-01-04"]),
    ],
)
def test_old_usage_is_deleted_if_enough_later_days_have_usage(tmp_path: Path, before: str, days: int, left: list[str]):
    store = Database(tmp_path)
    for day in range(1, 5):
        for model in ("tiny", "big"):
            store.usage.add("a", model, f"2026-01-0{day}", UsageTotals(1))
    store.usage.delete_before(before, days)
    listed = sorted({row.day for row in store.usage.list_rows()})
    store.close()
    assert listed == left
    assert read(tmp_path, "SELECT DISTINCT day FROM usage ORDER BY day") == [(day,) for day in left]


def test_audit_log_keeps_the_newest_entries_in_memory_and_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = Database(tmp_path)
    for number in range(1, 8):
        store.audit.add(float(number), "k", "act", f"subject {number}", "10.0.0.7")
    store.close()
    monkeypatch.setattr(tables, "MAX_AUDIT_ENTRIES", 5)
    store = Database(tmp_path)
    assert [row.number for row in store.audit] == [3, 4, 5, 6, 7]
    store.audit.add(8.0, "k", "act", "subject 8")
    assert ([row.number for row in store.audit[-2:]], store.audit[0].number, len(store.audit)) == ([7, 8], 4, 5)
    store.close()
    assert read(tmp_path, "SELECT number, at FROM audit ORDER BY number") == [(n, float(n)) for n in range(4, 9)]
    assert read(tmp_path, "SELECT actor, action, subject, address FROM audit WHERE number = 4") == [
        ("k", "act", "subject 4", "10.0.0.7")
    ]


def test_deny_list_has_nodes_and_serials_apart_with_time_and_reason(tmp_path: Path):
    store = Database(tmp_path)
    store.deny_list.add_node(NodeId("ab"), 3.0, "removed")
    store.deny_list.add_serial("cd", 4.0, "renewed")
    denied = [
        store.deny_list.is_denied(NodeId(node), serial)
        for node, serial in (("ab", "ff"), ("x", "cd"), ("cd", "ab"), ("x", "ff"))
    ]
    store.close()
    assert denied == [True, True, False, False]
    assert sorted(read(tmp_path, "SELECT * FROM denied")) == [
        ("node:ab", 3.0, "removed"),
        ("serial:cd", 4.0, "renewed"),
    ]


def test_a_row_that_is_put_again_is_the_new_one_after_a_restart(tmp_path: Path):
    member = MemberRow(NodeId("n1"), "studio", "m1", Hardware("M4", 1 << 37), "ab12", 5.0)
    token, wish = TokenRow("abcdefgh", b"k" * 32, 1.0, 2.0, 3), Wish("tiny")
    store = Database(tmp_path)
    for serial, uses, name, replicas in (("ab12", 3, "laptop", 1), ("cd34", 2, "desk", 2)):
        store.members.put(replace(member, serial=serial))
        store.tokens.put(replace(token, uses_left=uses))
        store.keys.put(replace(KEY, name=name))
        store.wishes.put(structs.replace(wish, replicas=replicas))
        store.deny_list.add_serial("ff", float(replicas), name)
    store.close()
    store = Database(tmp_path)
    assert (store.members[NodeId("n1")].serial, store.tokens["abcdefgh"].uses_left) == ("cd34", 2)
    assert (store.keys[KEY.id].name, store.wishes["tiny"].replicas) == ("desk", 2)
    store.close()
    assert read(tmp_path, "SELECT * FROM denied") == [("serial:ff", 2.0, "desk")]


def test_a_revoked_key_stays_on_the_disk_with_its_time(tmp_path: Path):
    store = Database(tmp_path)
    store.keys.put(KEY)
    assert store.keys.revoke(KEY.id, 7.0)
    assert KEY.id not in store.keys
    assert store.keys.was_empty, "when the database was opened"
    store.close()
    assert read(tmp_path, "SELECT id, revoked FROM keys") == [(KEY.id, 7.0)]
    store = Database(tmp_path)
    assert (len(store.keys), store.keys.was_empty) == (0, False), "a cluster gets its first key only once"
    store.close()
