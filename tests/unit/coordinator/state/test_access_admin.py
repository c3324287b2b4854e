"""Join tokens, API keys and the audit log for administrators."""

import sqlite3
import stat
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from coordinator.joining.join_tokens import JoinTokens
from coordinator.state.access_admin import AccessAdmin, NameReservedError, NameTakenError, load_pepper
from coordinator.state.database import Database
from coordinator.state.store_errors import StoreError
from coordinator.tls.cluster_ca import ClusterCa
from router.admission.api_keys import KeyRing
from router.admission.rate_limits import KeyLimits

NOW = 1_800_000_000.0


class Office:
    """An administration with a clock that a test sets."""

    def __init__(self, folder: Path) -> None:
        self.now = NOW
        self._folder = folder
        self._authority = ClusterCa(folder / "authority", lambda: NOW)
        self.open()
        self.store.create_cluster(self._authority.cluster, "home")

    def open(self) -> None:
        """Open the database, and load its keys."""
        self.store = Database(self._folder)
        pepper = load_pepper(self._folder, len(self.store.keys))
        self.ring = KeyRing(pepper, clock=lambda: self.now)
        tokens = JoinTokens(self.store, self._authority.ca, lambda: self.now)
        self.admin = AccessAdmin(self.store, tokens, self.ring, pepper, lambda: self.now)
        self.admin.load_keys()

    def restart(self) -> None:
        """Close the database, and open it as after a restart of the coordinator."""
        self.store.close()
        self.open()


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    made = Office(tmp_path)
    yield made
    made.store.close()


def test_a_revoked_token_is_not_listed(office: Office):
    office.admin.create_token(60.0, 1, "first")
    office.now += 1
    office.admin.create_token(60.0, 3, "second")
    second, first = office.admin.list_tokens()["tokens"]
    assert (first["name"], first["uses_left"], first["created"], first["expires"]) == ("first", 1, NOW, NOW + 60)
    assert (second["name"], second["uses_left"]) == ("second", 3)
    assert office.admin.revoke_token(second["id"])
    assert not office.admin.revoke_token("unknown")
    assert office.admin.list_tokens()["tokens"] == [first]


def test_a_key_is_valid_at_once_and_after_a_restart(office: Office):
    limits = KeyLimits(models=("tiny",), requests_per_minute=5)
    made = office.admin.create_key("laptop", ["metrics", "infer"], 60.0, limits)
    plain = office.admin.create_key("desk", ["infer"], None, KeyLimits())
    assert office.store.keys[plain["id"]].limits is None
    office.restart()
    rows = office.admin.list_keys()["keys"]
    assert [(row["id"], row["name"], row["scopes"], row["created"], row["expires"]) for row in rows] == [
        (made["id"], "laptop", ["infer", "metrics"], NOW, NOW + 60),
        (plain["id"], "desk", ["infer"], NOW, None),
    ]
    assert [row["limits"] for row in rows] == [{"models": ("tiny",), "requests_per_minute": 5}, {}]
    assert made["key"] not in str(rows)
    key = office.ring.check(made["key"])
    assert key is not None
    assert (key.id, key.limits) == (made["id"], limits)
    office.now += 61
    assert office.ring.check(made["key"]) is None
    assert office.ring.check(plain["key"]) is not None


def test_changes_of_a_key_are_in_force_at_once_and_after_a_restart(office: Office):
    made = office.admin.create_key("laptop", ["infer"], 60.0, KeyLimits(concurrency=1))
    assert office.admin.set_key_limits(made["id"], KeyLimits(concurrency=2))
    assert office.admin.rename_key(made["id"], "desk")
    office.now += 50
    assert office.admin.set_key_expiry(made["id"], 100.0)
    text = office.admin.rotate_key(made["id"])
    assert text is not None
    for _ in range(2):
        office.now = NOW + 149
        assert office.ring.check(made["key"]) is None, "the former secret is void"
        key = office.ring.check(text)
        assert key is not None
        assert (key.id, key.name, key.limits, key.expires) == (made["id"], "desk", KeyLimits(concurrency=2), NOW + 150)
        office.now += 2
        assert office.ring.check(text) is None
        office.restart()
    assert office.admin.set_key_expiry(made["id"], None)
    assert office.ring.check(text) is not None
    assert office.admin.set_key_limits(made["id"], KeyLimits())
    assert office.store.keys[made["id"]].limits is None
    assert office.admin.set_key_expiry(made["id"], 0.0)
    assert office.ring.check(text) is None, "it expires now, and not never"


def test_an_unknown_key_is_not_changed(office: Office):
    admin = office.admin
    assert admin.rotate_key("unknown") is None
    assert not admin.set_key_limits("unknown", KeyLimits(concurrency=2))
    assert not admin.rename_key("unknown", "desk")
    assert not admin.set_key_expiry("unknown", None)
    assert not admin.revoke_key("unknown")
    assert admin.list_keys()["keys"] == []


def test_a_revoked_key_is_void_at_once_and_after_a_restart(office: Office):
    made = office.admin.create_key("laptop", ["infer"], None)
    assert office.admin.revoke_key(made["id"])
    assert not office.admin.revoke_key(made["id"])
    for _ in range(2):
        assert office.ring.check(made["key"]) is None
        assert office.admin.list_keys()["keys"] == []
        office.restart()


async def test_without_a_disk_no_key_is_created_or_changed_but_a_key_can_be_revoked(office: Office, tmp_path: Path):
    first, second = (office.admin.create_key(name, ["infer"], None) for name in ("first", "second"))
    await office.store.flush()
    with closing(sqlite3.connect(tmp_path / "cluster.db")) as other:
        other.execute("ALTER TABLE audit RENAME TO away")
        office.store.audit.add(NOW, "person", "look", "")
        with pytest.raises(StoreError):
            await office.store.flush()
        for change in (
            lambda: office.admin.create_key("third", ["infer"], None),
            lambda: office.admin.rotate_key(first["id"]),
            lambda: office.admin.rename_key(first["id"], "other"),
            lambda: office.admin.revoke_key(second["id"]),
        ):
            with pytest.raises(StoreError):
                change()
        other.execute("ALTER TABLE away RENAME TO audit")
    for _ in range(2):
        assert [key["name"] for key in office.admin.list_keys()["keys"]] == ["first"]
        assert office.ring.check(first["key"]) is not None, "its secret is not replaced by one that is lost"
        assert office.ring.check(second["key"]) is None
        office.restart()


def test_names_of_keys_are_unique_and_no_ids(office: Office):
    made, other = (office.admin.create_key(name, ["infer"], None) for name in ("Laptop", "desk"))
    check = office.admin.check_key_name
    for taken in ("laptop", "LAPTOP", made["id"], made["id"].upper()):
        with pytest.raises(NameTakenError, match=f"a key named Laptop exists already \\({made['id']}\\)"):
            check(taken)
        with pytest.raises(NameTakenError, match="Laptop"):
            check(taken, except_key=other["id"])
        check(taken, except_key=made["id"])
    for reserved in ("local", "page"):
        with pytest.raises(NameReservedError, match=reserved):
            check(reserved)
    check("new")


def test_the_newest_audit_entries_name_the_key_that_acted(office: Office):
    made = office.admin.create_key("laptop", ["admin"], None)
    for number, actor in enumerate((made["id"], "local", made["id"])):
        office.store.audit.add(NOW + number, actor, "cordon", f"n{number}", "10.0.0.1")
    assert office.admin.list_audit_entries(0)["acts"] == []
    (entry,) = office.admin.list_audit_entries(1)["acts"]
    assert entry == {
        "number": 3,
        "at": NOW + 2,
        "actor": made["id"],
        "action": "cordon",
        "subject": "n2",
        "address": "10.0.0.1",
        "actor_name": "laptop",
    }
    entries = office.admin.list_audit_entries(9)["acts"]
    assert [(one["subject"], one["actor_name"]) for one in entries] == [("n0", "laptop"), ("n1", ""), ("n2", "laptop")]


def test_the_pepper_is_private_and_is_created_once(tmp_path: Path):
    pepper = load_pepper(tmp_path, 0)
    assert (len(pepper), stat.S_IMODE((tmp_path / "pepper").stat().st_mode)) == (32, 0o600)
    assert load_pepper(tmp_path, 0) == pepper


@pytest.mark.parametrize("left", [None, b""])
def test_keys_whose_pepper_is_lost_are_not_replaced_in_silence(tmp_path: Path, left: bytes | None):
    pepper, file = load_pepper(tmp_path, 0), tmp_path / "pepper"
    assert load_pepper(tmp_path, 2) == pepper
    file.unlink() if left is None else file.write_bytes(left)
    with pytest.raises(StoreError) as caught:
        load_pepper(tmp_path, 2)
    state = "missing" if left is None else "empty"
    assert f"{file} is {state}, and without it none of 2 API keys is valid: restore" in str(caught.value)
    command = str(caught.value).partition("keys, run `")[2].partition("`")[0]
    subprocess.run(["/bin/sh", "-c", command], check=True)
    assert (len(load_pepper(tmp_path, 2)), stat.S_IMODE(file.stat().st_mode)) == (32, 0o600)
    file.unlink()
    assert load_pepper(tmp_path, 0) != pepper, "a new cluster gets its own"


def test_every_answer_names_its_schema(office: Office):
    admin = office.admin
    answers = [admin.create_token(60.0, 1, ""), admin.list_tokens(), admin.create_key("a", ["infer"], None)]
    answers += [admin.list_keys(), admin.list_audit_entries(1), admin.usage.sum()]
    assert [answer["schema"] for answer in answers] == [1] * 6
