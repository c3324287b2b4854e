"""Start of a node: its join token, the cluster that it joins, and the exit codes of a failed enrollment."""

import os
import time
from pathlib import Path

import pytest

from coordinator.tls.cluster_ca import ClusterCa
from host.node_marks import has_left, mark_left
from node.agent.discovery import DiscoveredService
from node.agent.enrollment import (
    CoordinatorUnreachable,
    EnrollDenied,
    EnrollError,
    IdentityError,
    PinMismatch,
    load_identity,
)
from node.agent.machine_id import compute_machine_id
from node.join import choose_cluster, choose_exit_code, find_answering, prepare_identity, read_token
from node.node_lock import NodeStartError
from node.settings import NodeSettings
from node.settings.agent import AgentSettings
from tests.support.cluster.enrolment import HARDWARE, opened
from tests.support.cluster.older_protocol import OldCoordinator
from wire.frames import Denied
from wire.join_token import JoinToken, new_token

LAB = DiscoveredService("lab", "aaaa00000000", ("10.0.0.2", "fd00::2"), 8081, fingerprint="0" * 16)
HOME = DiscoveredService("home", "bbbb00000000", ("10.1.0.2",), 8081, fingerprint="1" * 16)
MOVED_LAB = DiscoveredService("lab-2", "aaaa00000000", ("10.0.0.9",), 9081, fingerprint="0" * 16)
LAB_TOKEN = JoinToken(bytes(32), "id", bytes(16))
OTHER_TOKEN = JoinToken(b"\x22" * 32, "id", bytes(16))


def _write_pipe(text: str) -> int:
    read, write = os.pipe()
    os.write(write, text.encode())
    os.close(write)
    return read


def test_a_token_is_read_from_its_descriptor_which_is_closed() -> None:
    token = new_token(b"any authority")
    read = _write_pipe(f" {token}\n")
    assert read_token(read) == token
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(read)
    assert read_token(None) is None
    assert read_token(_write_pipe(" \n")) is None


def test_a_text_that_is_no_token_ends_with_the_code_of_a_denial() -> None:
    with pytest.raises(NodeStartError, match="this is not a join token") as raised:
        read_token(_write_pipe("mpj1.secret"))
    assert raised.value.code == 4
    assert "secret" not in str(raised.value).removeprefix("this is not a join token: one has the form ").split(";")[1]


@pytest.mark.parametrize(
    ("services", "token", "addresses"),
    [
        ([LAB], None, ["10.0.0.2:8081", "[fd00::2]:8081"]),
        ([HOME, LAB], LAB_TOKEN, ["10.0.0.2:8081", "[fd00::2]:8081"]),
        ([LAB, MOVED_LAB], None, ["10.0.0.2:8081", "[fd00::2]:8081", "10.0.0.9:9081"]),
        ([LAB], OTHER_TOKEN, ["10.0.0.2:8081", "[fd00::2]:8081"]),
    ],
    ids=["the only one", "that of the token", "two records of one cluster", "the only one, of another token"],
)
def test_the_addresses_of_one_cluster_are_chosen(
    services: list[DiscoveredService], token: JoinToken | None, addresses: list[str]
) -> None:
    assert choose_cluster(services, token) == addresses


@pytest.mark.parametrize("token", [None, OTHER_TOKEN])
def test_of_several_clusters_none_is_chosen_without_its_token(token: JoinToken | None) -> None:
    with pytest.raises(
        NodeStartError, match=r"several.*: lab at 10\.0\.0\.2:8081 or \[fd00::2\]:8081, home at 10\.1\.0\.2:8081$"
    ) as raised:
        choose_cluster([LAB, HOME], token)
    assert raised.value.code == 2
    with pytest.raises(NodeStartError, match="found no cluster: run `cluster join HOST:8081") as raised:
        choose_cluster([], token)
    assert raised.value.code == 3


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EnrollDenied(Denied("protocol", "older")), 8),
        (EnrollDenied(Denied("token", "used")), 4),
        (PinMismatch("another CA"), 9),
        (CoordinatorUnreachable("refused"), 3),
        (EnrollError("invalid address"), 1),
        (IdentityError("another key"), 1),
    ],
)
def test_exit_codes_of_a_failed_enrollment(error: Exception, code: int) -> None:
    assert choose_exit_code(error) == code


async def test_of_several_addresses_the_one_where_the_coordinator_of_the_token_answers_is_used(tmp_path: Path) -> None:
    closed = "127.0.0.1:1"
    async with opened(tmp_path / "other") as other, opened(tmp_path / "own") as own:
        addresses = [closed, other.address, own.address]
        assert await find_answering(addresses, own.tokens.create()) == own.address
        assert await find_answering(addresses, None) == other.address
        assert await find_answering([closed, other.address], own.tokens.create()) == closed
        assert not other.joined


async def test_a_known_identity_is_used_and_a_new_address_is_stored(tmp_path: Path) -> None:
    coordinator = OldCoordinator(ClusterCa(tmp_path / "authority", time.time), tmp_path, "127.0.0.1:1")
    state = coordinator.node("studio")
    settings = NodeSettings(node=AgentSettings(machine="studio"))
    kept = await prepare_identity(state, None, None, settings, HARDWARE, may_enroll=False)
    assert (kept.name, kept.addresses) == ("studio", ("127.0.0.1:1",))
    moved = await prepare_identity(state, "127.0.0.1:2", None, settings, HARDWARE, may_enroll=True)
    assert moved.addresses == ("127.0.0.1:2", "127.0.0.1:1")
    assert load_identity(state / "node" / "identity", compute_machine_id("studio")) == moved


async def test_a_folder_without_a_node_ends_with_its_code_if_none_may_be_made(tmp_path: Path) -> None:
    with pytest.raises(NodeStartError, match=f"there is no node in {tmp_path}") as raised:
        await prepare_identity(tmp_path, None, None, NodeSettings(), HARDWARE, may_enroll=False)
    assert raised.value.code == 5


async def test_a_node_joins_at_the_address_given_and_is_no_longer_marked_as_left(tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    mark_left(tmp_path / "node")
    async with opened(tmp_path / "c") as door:
        settings = NodeSettings(node=AgentSettings(name="studio", machine="m1"))
        identity = await prepare_identity(
            tmp_path, door.address, door.tokens.create(), settings, HARDWARE, may_enroll=True
        )
        assert (identity.name, identity.addresses) == ("studio", (door.address,))
        assert [row.node for row in door.joined] == [identity.node]
    assert load_identity(tmp_path / "node" / "identity", compute_machine_id("m1")) == identity
    assert not has_left(tmp_path / "node")
