import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from cryptography import x509

from coordinator.joining.enrollment import (
    CONNECTION_TIMEOUT_SECONDS,
    MAX_CONNECTION_BYTES,
    EnrollmentConnection,
    EnrollmentContext,
    EnrollmentServer,
    make_unique_name,
)
from coordinator.joining.join_approvals import (
    APPROVAL_TIMEOUT_SECONDS,
    MAX_WAITING,
    MAX_WAITING_PER_ADDRESS,
    ApprovalQueue,
    WaitingNode,
)
from coordinator.joining.join_tokens import JoinTokens
from coordinator.joining.rate_limit import RateLimit
from coordinator.models.wishes import Wish
from coordinator.state.database import Database
from coordinator.state.rows import MemberRow
from coordinator.state.store_errors import StoreError
from coordinator.tls.cluster_ca import ClusterCa
from node.agent.identity import new_request, prove_identity, store_identity
from tests.support.cluster.enrolment import HARDWARE, Wall
from wire.certificate import read_certificate
from wire.codec import encode
from wire.frames import Denied, Enroll, EnrollAuthority, Enrolled, EnrollPending, EnrollStart, Frame, Goodbye
from wire.identity import PROTOCOL, NodeId
from wire.join_token import compute_request_mac, derive_token_key
from wire.pairing_code import compute_commitment, compute_short_code
from wire.report import Hardware

START = EnrollStart(PROTOCOL)
NONCE = b"n" * 16


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EnrollmentContext]:
    wall, store = Wall(), Database(tmp_path)
    authority = ClusterCa(tmp_path, wall)
    joined: list[MemberRow] = []
    yield EnrollmentContext(
        "lab", authority, JoinTokens(store, authority.ca, wall), store, ApprovalQueue(), wall, joined.append
    )
    store.close()


def ignore() -> None: ...


def talk(cluster: EnrollmentContext, now: float = 0.0, wake: Callable[[], object] = ignore) -> EnrollmentConnection:
    conversation = EnrollmentServer(cluster).start_enrollment("10.0.0.7", now, wake)
    assert isinstance(conversation, EnrollmentConnection)
    return conversation


def denied(frames: list[Frame]) -> str:
    (frame,) = frames
    assert isinstance(frame, Denied)
    return frame.reason


def with_token(cluster: EnrollmentContext, csr: bytes, name: str = "studio", machine: str = "m1") -> Enroll:
    token = cluster.tokens.create()
    return Enroll(csr, name, machine, HARDWARE, token.id, compute_request_mac(derive_token_key(token.secret), csr))


def pending(
    cluster: EnrollmentContext, now: float = 0.0, wake: Callable[[], object] = ignore
) -> tuple[EnrollmentConnection, str]:
    """Advance a conversation to the decision of an administrator."""
    conversation, csr = talk(cluster, now, wake), new_request("air").csr
    (authority,) = conversation.process_frame(EnrollStart(PROTOCOL, compute_commitment(NONCE, csr)), now)
    assert isinstance(authority, EnrollAuthority)
    assert conversation.process_frame(Enroll(csr, "air", "m1", HARDWARE, opening=NONCE), now) == [
        EnrollPending(APPROVAL_TIMEOUT_SECONDS)
    ]
    return conversation, compute_short_code(authority.ca, csr, NONCE, authority.nonce)


def test_the_whole_conversation_with_a_token(cluster: EnrollmentContext) -> None:
    conversation, csr = talk(cluster), new_request("studio").csr
    (authority,) = conversation.feed(encode(START), 0.0)
    assert isinstance(authority, EnrollAuthority)
    assert (authority.ca, authority.cluster_name) == (cluster.authority.ca, "lab")
    (enrolled,) = conversation.feed(encode(with_token(cluster, csr)), 0.1)
    assert isinstance(enrolled, Enrolled)
    assert conversation.closed
    assert conversation.feed(encode(START), 0.2) == []
    assert x509.load_der_x509_certificate(enrolled.certificate).public_key()


@pytest.mark.parametrize(("protocol", "who"), [(0, "node"), (PROTOCOL + 1, "coordinator")])
def test_enrollment_with_another_protocol_names_the_side_to_update(
    cluster: EnrollmentContext, protocol: int, who: str
) -> None:
    conversation = talk(cluster)
    (answer,) = conversation.process_frame(EnrollStart(protocol), 0.0)
    assert isinstance(answer, Denied)
    assert (answer.reason, answer.final) == ("protocol", True)
    assert answer.message.endswith(f"update macpool on the {who}")


@pytest.mark.parametrize(
    ("name", "machine", "reason"),
    [("", "m1", "bad_name"), ("<b>", "m1", "bad_name"), ("a\n", "m1", "bad_name"), ("a", "m/1", "bad_machine")],
)
def test_enrollment_with_invalid_fields_does_not_use_the_token(
    cluster: EnrollmentContext, name: str, machine: str, reason: str
) -> None:
    conversation = talk(cluster)
    conversation.process_frame(START, 0.0)
    assert denied(conversation.process_frame(with_token(cluster, new_request("a").csr, name, machine), 0.0)) == reason
    assert [token.uses_left for token in cluster.tokens.list()] == [1]


def test_a_request_that_is_not_signed_uses_no_token(cluster: EnrollmentContext) -> None:
    conversation = talk(cluster)
    conversation.process_frame(START, 0.0)
    assert denied(conversation.process_frame(with_token(cluster, b"junk"), 0.0)) == "bad_request"
    assert [token.uses_left for token in cluster.tokens.list()] == [1]


def test_only_the_order_of_the_conversation_is_possible(cluster: EnrollmentContext) -> None:
    enrol = with_token(cluster, new_request("a").csr)
    assert denied(talk(cluster).process_frame(enrol, 0.0)) == "unexpected"
    twice = talk(cluster)
    twice.process_frame(START, 0.0)
    assert denied(twice.process_frame(START, 0.0)) == "unexpected"
    waiting, _ = pending(cluster)
    assert denied(waiting.process_frame(enrol, 1.0)) == "unexpected"
    assert not cluster.approvals.list_waiting(1.0)


def test_patience_ends(cluster: EnrollmentContext) -> None:
    conversation = talk(cluster, 100.0)
    assert conversation.deadline == 100.0 + CONNECTION_TIMEOUT_SECONDS
    assert conversation.poll(104.9) == []
    assert denied(conversation.poll(conversation.deadline)) == "too_slow"
    late = talk(cluster, 100.0)
    assert denied(late.process_frame(START, 105.0)) == "too_slow"


def test_slow_bytes_do_not_buy_time(cluster: EnrollmentContext) -> None:
    conversation, answers = talk(cluster), list[Frame]()
    for number, byte in enumerate(encode(START)):
        answers += conversation.feed(bytes([byte]), float(number))
    assert denied(answers + conversation.poll(CONNECTION_TIMEOUT_SECONDS)) == "too_slow"


def test_a_code_is_approved(cluster: EnrollmentContext) -> None:
    woken: list[bool] = []
    conversation, code = pending(cluster, wake=lambda: woken.append(True))
    assert conversation.poll(1.0) == []
    cluster.approvals.approve(code, 1.0)
    assert woken == [True]
    (enrolled,) = conversation.poll(1.0)
    assert isinstance(enrolled, Enrolled)
    assert conversation.closed


def test_a_code_is_rejected_or_forgotten(cluster: EnrollmentContext) -> None:
    conversation, code = pending(cluster)
    cluster.approvals.reject(code, 1.0)
    assert denied(conversation.poll(1.0)) == "rejected"
    slow, _ = pending(cluster, 10.0)
    assert slow.poll(609.0) == []
    assert denied(slow.poll(610.0)) == "approval_expired"


def test_closed_connection_withdraws_its_join_request(cluster: EnrollmentContext) -> None:
    conversation, _ = pending(cluster)
    conversation.withdraw()
    assert not cluster.approvals.list_waiting(0.0)
    assert conversation.poll(1.0) == []


def test_nonce_and_request_are_those_that_were_committed_to(cluster: EnrollmentContext) -> None:
    csr, other = new_request("air").csr, new_request("air").csr
    for asked, opening in ((other, NONCE), (csr, b"m" * 16), (csr, b"")):
        conversation = talk(cluster)
        conversation.process_frame(EnrollStart(PROTOCOL, compute_commitment(NONCE, csr)), 0.0)
        frame = Enroll(asked, "air", "m1", HARDWARE, opening=opening)
        assert denied(conversation.process_frame(frame, 0.0)) == "commitment_broken"
    bare = talk(cluster)
    bare.process_frame(START, 0.0)
    assert denied(bare.process_frame(Enroll(csr, "air", "m1", HARDWARE, opening=NONCE), 0.0)) == "token_needed"


def test_enrollment_limits_the_rate_of_an_address(cluster: EnrollmentContext) -> None:
    door = EnrollmentServer(cluster, RateLimit(30, 2))
    assert isinstance(door.start_enrollment("10.0.0.7", 0.0, ignore), EnrollmentConnection)
    assert isinstance(door.start_enrollment("10.0.0.7", 0.0, ignore), EnrollmentConnection)
    answer = door.start_enrollment("10.0.0.7", 0.0, ignore)
    assert isinstance(answer, Denied)
    assert (answer.reason, answer.retry_after) == ("too_often", 2.0)
    assert isinstance(door.start_enrollment("10.0.0.8", 0.0, ignore), EnrollmentConnection)


def test_enrollment_makes_fields_of_a_joining_machine_printable(cluster: EnrollmentContext) -> None:
    conversation, csr = talk(cluster), new_request("a").csr
    conversation.process_frame(START, 0.0)
    good = with_token(cluster, csr)
    told = Hardware("\x1b[31m<script>" + "x" * 200, -5, -1, "macOS", "3.13")
    conversation.process_frame(Enroll(csr, "a", "m1", told, good.token, good.mac), 0.0)
    (row,) = cluster.store.members.values()
    assert row.hardware.chip.startswith("??31m?script?x")
    assert len(row.hardware.chip) == 64
    assert (row.hardware.memory, row.hardware.cores) == (0, 0)
    waiting = talk(cluster)
    waiting.process_frame(EnrollStart(PROTOCOL, compute_commitment(NONCE, csr)), 0.0)
    waiting.process_frame(Enroll(csr, "b", "m2", told, opening=NONCE), 0.0)
    (displayed,) = cluster.approvals.list_waiting(0.0)
    assert displayed.hardware == row.hardware


def test_a_removed_machine_becomes_a_new_node(cluster: EnrollmentContext) -> None:
    nodes: list[str] = []
    for _ in range(2):
        conversation = talk(cluster)
        conversation.process_frame(START, 0.0)
        (enrolled,) = conversation.process_frame(with_token(cluster, new_request("a").csr), 0.0)
        assert isinstance(enrolled, Enrolled)
        nodes.append(enrolled.node)
        row = cluster.store.members[list(cluster.store.members)[-1]]
        cluster.store.members.put(
            MemberRow(row.node, row.name, row.machine, row.hardware, row.serial, row.joined, removed=1.0)
        )
    assert nodes[0] != nodes[1]
    assert {row.name for row in cluster.store.members.values()} == {"studio"}


def test_new_node_of_a_removed_machine_takes_its_place_in_wishes(cluster: EnrollmentContext) -> None:
    store, nodes = cluster.store, list[NodeId]()
    for _ in range(2):
        conversation = talk(cluster)
        conversation.process_frame(START, 0.0)
        (enrolled,) = conversation.process_frame(with_token(cluster, new_request("a").csr), 0.0)
        assert isinstance(enrolled, Enrolled)
        nodes.append(NodeId(enrolled.node))
        if len(nodes) == 1:
            mini = NodeId("mini")
            for wish in (Wish("tiny", allow=(nodes[0], mini)), Wish("large", deny=(nodes[0],)), Wish("free")):
                store.wishes.put(wish)
            store.members.put(replace(store.members[nodes[0]], removed=1.0))
    assert {name: (set(wish.allow), set(wish.deny)) for name, wish in store.wishes.items()} == {
        "tiny": ({nodes[1], "mini"}, set()),
        "large": (set(), {nodes[1]}),
        "free": (set(), set()),
    }


def test_names_are_made_unique() -> None:
    assert make_unique_name("mac", []) == "mac"
    assert make_unique_name("mac", ["MAC"]) == "mac-2"
    assert make_unique_name("mac", ["mac", "mac-2", "mac-3"]) == "mac-4"
    assert make_unique_name("x" * 63, ["x" * 63]) == "x" * 61 + "-2"


def test_enrollment_of_a_known_machine_keeps_its_administration(cluster: EnrollmentContext) -> None:
    """The machine keeps node, cordon, labels and permission for videos. Its former certificate is denied, and the audit
    log has the replacement."""
    first = talk(cluster)
    first.process_frame(START, 0.0)
    (enrolled,) = first.process_frame(with_token(cluster, new_request("studio").csr), 0.0)
    assert isinstance(enrolled, Enrolled)
    (row,) = cluster.store.members.values()
    cluster.store.members.put(replace(row, cordoned=True, labels=("lab", "fast"), video=True))
    again, csr = talk(cluster), new_request("studio").csr
    again.process_frame(START, 0.0)
    token = cluster.tokens.create(replaces=True)
    (other,) = again.process_frame(
        Enroll(csr, "renamed", "m1", HARDWARE, token.id, compute_request_mac(derive_token_key(token.secret), csr)), 0.0
    )
    assert isinstance(other, Enrolled)
    (after,) = cluster.store.members.values()
    assert (after.node, other.node, after.name) == (row.node, row.node, "renamed")
    assert (after.cordoned, after.labels, after.video) == (True, ("lab", "fast"), True)
    assert after.serial == read_certificate(other.certificate).serial != row.serial
    assert cluster.store.deny_list.is_denied(row.node, row.serial)
    assert not cluster.store.deny_list.is_denied(row.node, after.serial)
    assert [act.action for act in cluster.store.audit] == ["joined", "replaced", "joined"]
    assert [act.address for act in cluster.store.audit] == ["10.0.0.7"] * 3


async def test_enrollment_changes_nothing_while_the_disk_takes_no_change(
    cluster: EnrollmentContext, tmp_path: Path
) -> None:
    first = talk(cluster)
    first.process_frame(START, 0.0)
    first.process_frame(with_token(cluster, new_request("studio").csr), 0.0)
    store, again, csr, token = (
        cluster.store,
        talk(cluster),
        new_request("studio").csr,
        cluster.tokens.create(replaces=True),
    )
    approved, code = pending(cluster)
    cluster.approvals.approve(code, 1.0)
    await store.flush()
    with closing(sqlite3.connect(tmp_path / "cluster.db")) as other:
        other.execute("ALTER TABLE audit RENAME TO away")
    store.audit.add(1.0, "person", "create keys", "laptop")
    with pytest.raises(StoreError):
        await store.flush()
    members, unwritten = dict(store.members), store.count_unwritten()
    again.process_frame(START, 0.0)
    request = Enroll(csr, "renamed", "m1", HARDWARE, token.id, compute_request_mac(derive_token_key(token.secret), csr))
    with pytest.raises(StoreError):
        again.process_frame(request, 0.0)
    with pytest.raises(StoreError):
        approved.poll(1.0)
    (row,) = members.values()
    assert (dict(store.members), store.count_unwritten()) == (members, unwritten)
    assert not store.deny_list.is_denied(row.node, row.serial)
    assert store.tokens[token.id].uses_left == 1, "the token works once the disk has room"
    with closing(sqlite3.connect(tmp_path / "cluster.db")) as other:
        other.execute("ALTER TABLE away RENAME TO audit")


def test_a_new_member_has_the_certificate_that_was_signed_and_nothing_decided(cluster: EnrollmentContext) -> None:
    conversation, csr = talk(cluster), new_request("studio").csr
    conversation.process_frame(START, 0.0)
    (enrolled,) = conversation.process_frame(with_token(cluster, csr), 0.0)
    assert isinstance(enrolled, Enrolled)
    (row,) = cluster.store.members.values()
    told = read_certificate(enrolled.certificate)
    assert (row.node, row.name, row.machine, row.hardware) == (enrolled.node, "studio", "m1", HARDWARE)
    assert (row.serial, row.joined) == (told.serial, cluster.clock())
    assert (row.cordoned, row.labels, row.video, row.removed) == (False, (), False, None)
    assert told.uri == f"cluster://{cluster.authority.cluster}/node/{enrolled.node}"
    assert cluster.tokens.list()[0].uses_left == 0
    (act,) = cluster.store.audit
    assert (act.actor, act.action, act.subject) == ("node", "joined", f"studio {enrolled.node}")


def test_a_member_that_is_linked_is_replaced_by_no_token_and_no_code(cluster: EnrollmentContext) -> None:
    first = talk(cluster)
    first.process_frame(START, 0.0)
    first.process_frame(with_token(cluster, new_request("studio").csr), 0.0)
    (row,) = cluster.store.members.values()

    def linked_from(node: NodeId) -> str:
        return "10.0.0.2" if node == row.node else ""

    linked = replace(cluster, get_link_address=linked_from)
    csr, token = new_request("studio").csr, cluster.tokens.create(replaces=True)
    with_it = talk(linked)
    with_it.process_frame(START, 0.0)
    asked = Enroll(csr, "studio", "m1", HARDWARE, token.id, compute_request_mac(derive_token_key(token.secret), csr))
    (answer,) = with_it.process_frame(asked, 0.0)
    assert isinstance(answer, Denied)
    assert (answer.reason, answer.final) == ("machine_taken", True)
    assert "is that of studio, which is linked now from 10.0.0.2" in answer.message
    by_code = talk(linked)
    by_code.process_frame(EnrollStart(PROTOCOL, compute_commitment(NONCE, csr)), 0.0)
    assert denied(by_code.process_frame(Enroll(csr, "studio", "m1", HARDWARE, opening=NONCE), 0.0)) == "machine_taken"
    assert cluster.store.members == {row.node: row}
    assert not cluster.approvals.list_waiting(0.0)


def test_enrollment_accepts_the_certificate_of_a_former_member_unless_denied(
    cluster: EnrollmentContext, tmp_path: Path
) -> None:
    first, request = talk(cluster), new_request("studio")
    first.process_frame(START, 0.0)
    (enrolled,) = first.process_frame(with_token(cluster, request.csr), 0.0)
    assert isinstance(enrolled, Enrolled)
    (row,) = cluster.store.members.values()
    store_identity(
        tmp_path / "node", request, enrolled.certificate, cluster.authority.cluster, cluster.authority.ca, "m1"
    )

    def again() -> list[Frame]:
        conversation, csr = talk(cluster), new_request("studio").csr
        conversation.process_frame(START, 0.0)
        certificate, proof = prove_identity(tmp_path / "node", csr)
        asked = with_token(cluster, csr)
        return conversation.process_frame(msgspec.structs.replace(asked, certificate=certificate, proof=proof), 0.0)

    (rejoined,) = again()
    assert isinstance(rejoined, Enrolled)
    assert rejoined.node == row.node
    assert "by its own key" in cluster.store.audit[-2].subject
    cluster.store.deny_list.add_serial(row.serial, 1.0, "stolen")
    assert denied(again()) == "machine_taken"


def refusal(frames: list[Frame]) -> tuple[str, bool, float]:
    (frame,) = frames
    assert isinstance(frame, Denied)
    return frame.reason, frame.final, frame.retry_after


def joined(cluster: EnrollmentContext, machine: str = "m1", name: str = "studio") -> MemberRow:
    """Join a machine with a token; return its member."""
    conversation = talk(cluster)
    conversation.process_frame(START, 0.0)
    (enrolled,) = conversation.process_frame(with_token(cluster, new_request(name).csr, name, machine), 0.0)
    assert isinstance(enrolled, Enrolled)
    return cluster.store.members[NodeId(enrolled.node)]


def asking(
    cluster: EnrollmentContext, machine: str = "m1", csr: bytes = b"", opening: bytes = NONCE
) -> tuple[EnrollmentConnection, list[Frame]]:
    """Send a join request with a code; return the conversation and its answer."""
    conversation, csr = talk(cluster), csr or new_request("air").csr
    conversation.process_frame(EnrollStart(PROTOCOL, compute_commitment(opening, csr)), 0.0)
    return conversation, conversation.process_frame(Enroll(csr, "air", machine, HARDWARE, opening=opening), 0.0)


def test_refusals_that_no_patience_mends_are_final(cluster: EnrollmentContext) -> None:
    csr = new_request("a").csr
    good = with_token(cluster, csr)
    wrong = {
        "bad_name": msgspec.structs.replace(good, name=""),
        "bad_machine": msgspec.structs.replace(good, machine="m/1"),
        "token_unknown": msgspec.structs.replace(good, token="abcdefgh"),
        "bad_request": with_token(cluster, b"junk"),
        "token_needed": Enroll(csr, "a", "m1", HARDWARE),
    }
    for reason, frame in wrong.items():
        conversation = talk(cluster)
        conversation.process_frame(START, 0.0)
        assert refusal(conversation.process_frame(frame, 0.0)) == (reason, True, 0.0)
    assert refusal(asking(cluster, csr=b"junk")[1]) == ("bad_request", True, 0.0)
    assert refusal(asking(cluster, opening=b"short")[1]) == ("commitment_broken", True, 0.0)
    rejected, code = pending(cluster)
    cluster.approvals.reject(code, 1.0)
    assert refusal(rejected.poll(1.0)) == ("rejected", True, 0.0)
    assert not cluster.store.members


def test_a_connection_may_send_so_many_bytes_and_is_over_after_a_refusal(cluster: EnrollmentContext) -> None:
    start = encode(START)
    spare = MAX_CONNECTION_BYTES - len(encode(Enroll(b"x" * (MAX_CONNECTION_BYTES - 300), "a", "m1", HARDWARE)))
    frame = encode(Enroll(b"x" * (MAX_CONNECTION_BYTES - 300 + spare), "a", "m1", HARDWARE))
    conversation = talk(cluster)
    assert len(conversation.feed(start, 0.0)) == 1
    assert conversation.feed(frame[: MAX_CONNECTION_BYTES - len(start)], 0.0) == []
    assert refusal(conversation.feed(b"x", 0.0)) == ("too_long", False, 0.0)
    assert conversation.feed(b"\xff" * 100, 0.0) == []
    assert conversation.process_frame(START, 0.0) == []


def test_frames_of_one_piece_are_answered_up_to_the_first_refusal(cluster: EnrollmentContext) -> None:
    def answers(*words: Frame | bytes) -> list[str]:
        data = b"".join(word if isinstance(word, bytes) else encode(word) for word in words)
        return [one.reason if isinstance(one, Denied) else type(one).__name__ for one in talk(cluster).feed(data, 0.0)]

    assert answers(START, with_token(cluster, new_request("a").csr)) == ["EnrollAuthority", "Enrolled"]
    assert answers(START, Goodbye("asleep")) == ["EnrollAuthority", "no_certificate"]
    assert answers(START, START, Goodbye("asleep")) == ["EnrollAuthority", "unexpected"]
    assert answers(START, b"\xff" * 50) == ["EnrollAuthority", "bad_frame"]


def test_an_address_waits_also_for_less_than_a_second(cluster: EnrollmentContext) -> None:
    door = EnrollmentServer(cluster, RateLimit(240, 1))
    door.start_enrollment("10.0.0.7", 0.0, ignore)
    answer = door.start_enrollment("10.0.0.7", 0.0, ignore)
    assert isinstance(answer, Denied)
    assert answer.retry_after == 0.25


def test_approval_replaces_only_the_member_that_was_displayed(cluster: EnrollmentContext) -> None:
    row = joined(cluster)
    conversation, code = pending(cluster)
    assert [one.replaces for one in cluster.approvals.list_waiting(0.0)] == ["studio"]
    cluster.approvals.approve(code, 1.0)
    (enrolled,) = conversation.poll(1.0)
    assert isinstance(enrolled, Enrolled)
    assert enrolled.node == row.node
    assert "by an approved code" in cluster.store.audit[-2].subject


def test_approval_of_a_new_machine_replaces_no_later_member(cluster: EnrollmentContext) -> None:
    conversation, code = pending(cluster)
    assert [one.replaces for one in cluster.approvals.list_waiting(0.0)] == [""]
    row = joined(cluster)
    cluster.approvals.approve(code, 1.0)
    (answer,) = conversation.poll(1.0)
    assert isinstance(answer, Denied)
    assert (answer.reason, answer.final) == ("machine_taken", True)
    assert "this machine is studio in the pool already" in answer.message
    assert cluster.store.members == {row.node: row}


def test_a_code_replaces_no_member_that_was_linked_meanwhile(cluster: EnrollmentContext) -> None:
    row, linked = joined(cluster), dict[NodeId, str]()
    conversation, code = pending(replace(cluster, get_link_address=lambda node: linked.get(node, "")))
    linked[row.node] = "10.0.0.2"
    cluster.approvals.approve(code, 1.0)
    assert refusal(conversation.poll(1.0)) == ("machine_taken", True, 0.0)


def test_a_refused_replacement_is_audited_once_in_a_row(cluster: EnrollmentContext) -> None:
    row = joined(cluster)

    def audited() -> list[tuple[str, str]]:
        conversation = talk(cluster)
        conversation.process_frame(START, 0.0)
        assert denied(conversation.process_frame(with_token(cluster, new_request("a").csr), 0.0)) == "machine_taken"
        return [(act.action, act.subject) for act in cluster.store.audit]

    refused = ("refused to replace", f"studio {row.node} from 10.0.0.7")
    first = [("joined", f"studio {row.node}")]
    assert [audited(), audited()] == [[*first, refused]] * 2
    other = joined(cluster, "m2", "air")
    assert audited() == [*first, refused, ("joined", f"air {other.node}"), refused]


def test_full_approval_queue_returns_a_retry_time(cluster: EnrollmentContext) -> None:
    for number in range(MAX_WAITING_PER_ADDRESS):
        asking(cluster, f"m{number}")
    assert refusal(asking(cluster, "more")[1]) == ("approvals_full", False, APPROVAL_TIMEOUT_SECONDS)


def test_evicted_join_request_is_denied_with_the_reason(cluster: EnrollmentContext) -> None:
    first, second = (asking(cluster, f"m{number}")[0] for number in range(2))
    for number in range(MAX_WAITING - 1):
        where = f"10.0.1.{number}"
        cluster.approvals.enqueue(
            WaitingNode(str(number), "x", f"x{number}", HARDWARE, where, APPROVAL_TIMEOUT_SECONDS), 0.0
        )
    assert refusal(first.poll(0.0)) == ("approvals_full", False, APPROVAL_TIMEOUT_SECONDS)
    assert second.poll(0.0) == []


def test_two_machines_of_one_name_are_two_nodes_with_names_of_their_own(cluster: EnrollmentContext) -> None:
    heard: list[MemberRow] = []
    told = replace(cluster, on_enrolled=heard.append)
    rows = [joined(told, machine) for machine in ("m1", "m2")]
    assert [row.name for row in rows] == ["studio", "studio-2"]
    assert heard == rows
    again, csr = talk(told), new_request("studio").csr
    again.process_frame(START, 0.0)
    token = cluster.tokens.create(replaces=True)
    asked = Enroll(csr, "studio", "m1", HARDWARE, token.id, compute_request_mac(derive_token_key(token.secret), csr))
    (enrolled,) = again.process_frame(asked, 0.0)
    assert isinstance(enrolled, Enrolled)
    assert (enrolled.node, cluster.store.members[rows[0].node].name) == (rows[0].node, "studio")
    assert cluster.store.audit[-2].subject == f"studio {rows[0].node} from 10.0.0.7 by a token"


def test_the_key_of_another_member_proves_nothing(cluster: EnrollmentContext, tmp_path: Path) -> None:
    joined(cluster)
    request, conversation = new_request("air"), talk(cluster)
    conversation.process_frame(START, 0.0)
    (enrolled,) = conversation.process_frame(with_token(cluster, request.csr, "air", "m2"), 0.0)
    assert isinstance(enrolled, Enrolled)
    store_identity(
        tmp_path / "node", request, enrolled.certificate, cluster.authority.cluster, cluster.authority.ca, "m2"
    )
    csr, posing = new_request("studio").csr, talk(cluster)
    certificate, proof = prove_identity(tmp_path / "node", csr)
    posing.process_frame(START, 0.0)
    asked = msgspec.structs.replace(with_token(cluster, csr), certificate=certificate, proof=proof)
    assert denied(posing.process_frame(asked, 0.0)) == "machine_taken"
