"""A new machine that names a member's machine replaces the member only with its key or through an administrator."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from node.agent.enrollment import EnrollDenied
from node.agent.identity import NodeIdentity, new_request, prove_identity
from tests.abuse.link.test_enrolment import join
from tests.support.cluster.enrolment import Door, opened
from wire.identity import NodeId
from wire.join_token import build_rejoin_text


def _noted(door: Door, action: str) -> list[str]:
    return [row.subject for row in door.store.audit if row.action == action]


def _row(door: Door, who: NodeIdentity) -> tuple[NodeId, str, str]:
    row = door.store.members[who.node]
    return row.node, row.name, row.serial


async def test_a_token_takes_over_no_member(tmp_path: Path) -> None:
    """Before this check the new machine got the member's id, name and labels, and the member was disconnected."""
    async with opened(tmp_path / "c") as door:
        token = door.tokens.create(uses=3)
        victim = await join(door, tmp_path / "victim", token)
        before = _row(door, victim)
        for _ in range(2):
            with pytest.raises(EnrollDenied, match="cluster node remove studio") as refused:
                await join(door, tmp_path / "thief", token)
            assert (refused.value.reason, refused.value.final) == ("machine_taken", True)
        assert _row(door, victim) == before
        assert not door.store.deny_list.is_denied(victim.node, before[2])
        assert door.store.tokens[token.id].uses_left == 2, "a refusal uses nothing up"
        assert _noted(door, "refused to replace") == [f"studio {victim.node} from 127.0.0.1"]


async def test_another_members_key_takes_over_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as door:
        token = door.tokens.create(uses=4)
        victim = await join(door, tmp_path / "victim", token)
        await join(door, tmp_path / "thief", token, machine="m2")
        with pytest.raises(EnrollDenied) as refused:
            await join(door, tmp_path / "thief", token, machine="m1")
        assert refused.value.reason == "machine_taken"
        assert door.store.members[victim.node].name == "studio"


async def test_a_certificate_without_its_key_proves_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as door:
        victim = await join(door, tmp_path / "victim", door.tokens.create())
        csr, wrong = new_request("studio").csr, new_request("studio")
        key = load_pem_private_key(wrong.key, None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        signed = key.sign(build_rejoin_text(csr), ec.ECDSA(hashes.SHA256()))
        for proof in (b"", b"x" * 70, signed):
            assert door.authority.identify_signer(victim.certificate, csr, proof) is None
        certificate, proof = prove_identity(victim.folder, csr)
        assert door.authority.identify_signer(certificate, new_request("studio").csr, proof) is None
        assert door.authority.identify_signer(b"junk", csr, proof) is None
        found = door.authority.identify_signer(certificate, csr, proof)
        assert found == (victim.node, door.store.members[victim.node].serial)


async def test_a_denied_certificate_proves_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as door:
        token = door.tokens.create(uses=4)
        victim = await join(door, tmp_path / "victim", token)
        door.store.deny_list.add_serial(door.store.members[victim.node].serial, 0.0, "stolen")
        with pytest.raises(EnrollDenied):
            await join(door, tmp_path / "victim", token)


async def test_the_members_own_key_joins_again_as_the_same_node(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as door:
        token = door.tokens.create(uses=2)
        first = await join(door, tmp_path / "n", token)
        (tmp_path / "n" / "identity.json").write_text("{")
        second = await join(door, tmp_path / "n", token)
        assert (second.node, second.name) == (first.node, first.name)
        assert _noted(door, "replaced") == [f"studio {first.node} from 127.0.0.1 by its own key"]


async def test_approved_code_replaces_the_displayed_member(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as door:
        first = await join(door, tmp_path / "a", door.tokens.create())
        loop = asyncio.get_running_loop()
        code: asyncio.Future[str] = loop.create_future()
        joining = asyncio.create_task(join(door, tmp_path / "b", None, on_code=code.set_result))
        shown = await code
        (waiting,) = door.approvals.list_waiting(loop.time())
        assert waiting.replaces == "studio"
        door.approvals.approve(shown, loop.time())
        assert (await joining).node == first.node
        assert _noted(door, "replaced") == [f"studio {first.node} from 127.0.0.1 by an approved code"]


async def test_a_code_that_was_approved_before_the_member_joined_replaces_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as door:
        loop = asyncio.get_running_loop()
        code: asyncio.Future[str] = loop.create_future()
        joining = asyncio.create_task(join(door, tmp_path / "b", None, on_code=code.set_result))
        shown = await code
        victim = await join(door, tmp_path / "a", door.tokens.create())
        door.approvals.approve(shown, loop.time())
        with pytest.raises(EnrollDenied) as refused:
            await joining
        assert refused.value.reason == "machine_taken"
        assert door.store.members[victim.node].removed is None


async def test_the_coordinators_own_machine_may_lose_its_identity(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as door:
        first = await join(door, tmp_path / "a", door.tokens.create())
        second = await join(door, tmp_path / "b", door.tokens.create(replaces=True))
        assert second.node == first.node


@pytest.mark.parametrize("replaces", [False, True], ids=["a token", "the coordinator's own token"])
async def test_a_machine_that_is_linked_from_elsewhere_is_not_expelled(tmp_path: Path, *, replaces: bool) -> None:
    async with opened(tmp_path / "c") as door:
        first = await join(door, tmp_path / "a", door.tokens.create())
        before = _row(door, first)
        door.linked[first.node] = "192.0.2.7"
        with pytest.raises(EnrollDenied, match=r"linked now from 192\.0\.2\.7.*node\.machine=NAME") as refused:
            await join(door, tmp_path / "b", door.tokens.create(replaces=replaces))
        assert (refused.value.reason, refused.value.final) == ("machine_taken", True)
        assert _row(door, first) == before


async def test_linked_machine_gets_no_code(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as door:
        first = await join(door, tmp_path / "a", door.tokens.create())
        door.linked[first.node] = "192.0.2.7"
        with pytest.raises(EnrollDenied, match="linked now"):
            await join(door, tmp_path / "b", None, on_code=lambda *_: None)
        assert door.approvals.list_waiting(asyncio.get_running_loop().time()) == []


async def test_a_member_that_linked_before_the_code_was_approved_is_not_expelled(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as door:
        first = await join(door, tmp_path / "a", door.tokens.create())
        loop = asyncio.get_running_loop()
        code: asyncio.Future[str] = loop.create_future()
        joining = asyncio.create_task(join(door, tmp_path / "b", None, on_code=code.set_result))
        shown = await code
        door.linked[first.node] = "192.0.2.7"
        door.approvals.approve(shown, loop.time())
        with pytest.raises(EnrollDenied, match="linked now"):
            await joining


async def test_a_removed_member_leaves_its_machine_free(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as door:
        first = await join(door, tmp_path / "a", door.tokens.create())
        door.store.members.put(replace(door.store.members[first.node], removed=1.0))
        second = await join(door, tmp_path / "b", door.tokens.create())
        assert second.node != first.node
        assert second.name == first.name
