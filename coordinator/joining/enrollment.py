"""Enrollment of peers without a certificate: the coordinator's side of the protocol, without its socket.

    EnrollStart ──► EnrollAuthority           (first connection, unverified: the node compares the CA with its pin)
    EnrollStart ──► EnrollAuthority           (second connection, verified with that CA)
    Enroll      ──► Enrolled | Denied         with a token
    Enroll      ──► EnrollPending … Enrolled | Denied    without a token: a person compares the codes
                                                         (join_approvals.py)

The peer is not trusted: it may send 16 KiB in total, has 5 s, and its connections are rate-limited. None of its claims
is trusted before its token or code is verified. After that, only its key, a valid name and its machine id are trusted.

A machine id is not secret, and knowledge of it does not replace a member. A request with the machine id of a member is
refused, unless the key of that member signed it. There are two more exceptions while that member is not linked. One
is a code that was shown as a replacement and that a person approved. The other is a token that was created for a
replacement (`JoinTokens.may_replace`). After `cluster node remove`, the machine enrolls as a new node, which
replaces the removed one in wishes for models.

The caller feeds bytes and sends the returned frames. It calls `poll` at `deadline` and whenever `wake` fires, and
`withdraw` when the connection ends. It flushes the store before it sends `Enrolled`, because a used token must stay
used.
"""

import hmac
import secrets
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum, auto

import structlog
from msgspec import structs

from coordinator.joining.join_approvals import (
    APPROVAL_TIMEOUT_SECONDS,
    ApprovalDecision,
    ApprovalQueue,
    ApprovalRequest,
    WaitingNode,
)
from coordinator.joining.join_tokens import MESSAGES, JoinTokens, Redemption
from coordinator.joining.rate_limit import RateLimit
from coordinator.state.database import Database
from coordinator.state.rows import MemberRow
from coordinator.tls.cluster_ca import CertificateRequestError, ClusterCa, extract_public_key
from wire.bonjour_record import sanitize_text
from wire.certificate import read_certificate
from wire.codec import Splitter, WireError, decode
from wire.frames import ENROLLMENT, TAGS, Denied, Enroll, EnrollAuthority, Enrolled, EnrollPending, EnrollStart, Frame
from wire.identity import OLDEST_PROTOCOL, PROTOCOL, NodeId, is_valid_id, is_valid_name
from wire.pairing_code import compute_commitment, compute_short_code
from wire.report import Hardware
from wire.units import KIB

log = structlog.get_logger()

MAX_CONNECTION_BYTES = 16 * KIB
"""Maximum bytes that one connection may send."""
CONNECTION_TIMEOUT_SECONDS = 5.0
"""Maximum seconds of one connection, without the wait for a person's approval."""
NONCE_BYTES = 16
"""Size of the coordinator's nonce, and minimum size of the nonce with which a node opens its commitment, in bytes."""


@dataclass(frozen=True, slots=True)
class EnrollmentContext:
    """Cluster in which nodes enroll, with the services that enrollment needs."""

    name: str
    """Display name of the cluster."""
    authority: ClusterCa
    tokens: JoinTokens
    store: Database
    approvals: ApprovalQueue
    clock: Callable[[], float]
    """Function that returns Unix seconds."""
    on_enrolled: Callable[[MemberRow], None]
    """Function that is called with each member that has enrolled, even if its machine was a member before."""
    get_link_address: Callable[[NodeId], str] = lambda node: ""
    """Function that returns the IP address from which a member is linked; empty if the member is not linked."""


class EnrollmentServer:
    """Entry point for enrollments, with a rate limit per address. `limit` replaces the default limit."""

    def __init__(self, cluster: EnrollmentContext, limit: RateLimit | None = None) -> None:
        self._cluster = cluster
        self._limit = limit or RateLimit()

    def start_enrollment(self, address: str, now: float, wake: Callable[[], object]) -> "EnrollmentConnection | Denied":
        """Begin the enrollment of a peer at the IP address `address`, or return `Denied` if it is over its rate limit.

        `now` is in monotonic seconds. `wake` is called when `EnrollmentConnection.poll` has frames to send before the
        deadline.
        """
        wait = self._limit.count_attempt(address, now)
        if wait > 0:
            log.warning("enrolment refused", address=address, why="too many attempts")
            return Denied("too_often", "too many attempts from this address: wait a minute", retry_after=wait)
        return EnrollmentConnection(self._cluster, address, now, wake)


class _Stage(Enum):
    START = auto()
    AUTHORITY_SENT = auto()
    PENDING = auto()


class EnrollmentConnection:
    """Enrollment of a peer without a certificate, on one connection. In all methods, `now` is monotonic seconds.

    `wake` is called when `poll` has frames to send before the deadline. `feed`, `process_frame` and `poll` raise
    `StoreError` after a failed write.
    """

    def __init__(self, cluster: EnrollmentContext, address: str, now: float, wake: Callable[[], object]) -> None:
        self._cluster = cluster
        self._address = address
        self._wake = wake
        self._splitter = Splitter(MAX_CONNECTION_BYTES, MAX_CONNECTION_BYTES)
        self._received_bytes = 0
        self._stage = _Stage.START
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._commitment = b""
        self._enroll: Enroll | None = None
        self._approval: ApprovalRequest | None = None
        self._replaces: NodeId | None = None
        self.deadline = now + CONNECTION_TIMEOUT_SECONDS
        """Monotonic time, in seconds, at which `poll` must be called."""
        self.closed = False
        """Whether the caller must close the connection, after it has sent the frames of the last call."""

    def feed(self, data: bytes, now: float) -> list[Frame]:
        """Process bytes that the peer has sent until `now` (monotonic seconds), and return the frames to send.

        Invalid bytes lead to a `Denied` frame. Once `closed` is set, bytes are discarded and no frames are returned.
        """
        self._received_bytes += len(data)
        if self.closed:
            return []
        if self._received_bytes > MAX_CONNECTION_BYTES:
            return self._deny("too_long", f"enrolment takes at most {MAX_CONNECTION_BYTES} bytes")
        answers: list[Frame] = []
        try:
            for tag, body in self._splitter.feed(data):
                if TAGS.get(tag) not in ENROLLMENT:
                    return answers + self._deny("no_certificate", "a peer without a certificate can only enrol")
                answers += self.process_frame(decode(tag, body), now)
                if self.closed:
                    break
        except WireError as error:
            answers += self._deny("bad_frame", str(error))
        return answers

    def process_frame(self, frame: Frame, now: float) -> list[Frame]:
        """Process one frame from the peer at `now` (monotonic seconds), and return the frames to send.

        An invalid frame leads to a `Denied` frame. After the deadline, the result is that of `poll`. Once `closed` is
        set, no frames are returned.
        """
        if self.closed:
            return []
        if now >= self.deadline:
            return self.poll(now)
        match frame:
            case EnrollStart() if self._stage is _Stage.START:
                return self._handle_start(frame)
            case Enroll() if self._stage is _Stage.AUTHORITY_SENT:
                return self._handle_enroll(frame, now)
            case _:
                return self._deny("unexpected", f"{type(frame).__name__} is not valid during enrolment")

    def poll(self, now: float) -> list[Frame]:
        """Return the frames to send at `now` (monotonic seconds), if any.

        There are frames after a person's decision, after the loss of the place in the queue, and after the deadline.
        Once `closed` is set, no frames are returned.
        """
        decision = self._approval.decision if self._approval else None
        if self.closed:
            return []
        if decision is ApprovalDecision.APPROVED and self._enroll:
            before = self._find_unproven_member(self._enroll)
            if before is not None and (before.node != self._replaces or self._is_linked(before)):
                return self._deny_machine_taken(before)
            return self._admit_node(self._enroll, "an approved code")
        if decision is ApprovalDecision.REJECTED:
            return self._deny("rejected", "a person rejected this machine on the coordinator", final=True)
        if self._approval and self._approval.displaced:
            message = "too many machines at this address wait for an approval: try again later, or use a token"
            return self._deny("approvals_full", message, retry_after=APPROVAL_TIMEOUT_SECONDS)
        if now < self.deadline:
            return []
        if self._approval:
            return self._deny(
                "approval_expired", f"the code was not approved within {APPROVAL_TIMEOUT_SECONDS:g} seconds: join again"
            )
        return self._deny("too_slow", f"enrolment takes at most {CONNECTION_TIMEOUT_SECONDS:g} seconds")

    def withdraw(self) -> None:
        """End the enrollment without a result, and withdraw a pending approval."""
        self.closed = True
        if self._approval:
            self._cluster.approvals.withdraw(self._approval)

    def _handle_start(self, frame: EnrollStart) -> list[Frame]:
        if not OLDEST_PROTOCOL <= frame.protocol <= PROTOCOL:
            older = "node" if frame.protocol < OLDEST_PROTOCOL else "coordinator"
            message = f"the node speaks protocol {frame.protocol}, the coordinator {OLDEST_PROTOCOL} to {PROTOCOL}"
            return self._deny("protocol", f"{message}: update macpool on the {older}", final=True)
        self._commitment = frame.commitment
        self._stage = _Stage.AUTHORITY_SENT
        authority = self._cluster.authority
        return [EnrollAuthority(authority.ca, authority.cluster, self._cluster.name, self._nonce)]

    def _handle_enroll(self, frame: Enroll, now: float) -> list[Frame]:
        if not is_valid_name(frame.name):
            return self._deny(
                "bad_name", "a name must have 1 to 63 letters, digits, spaces, dots or dashes", final=True
            )
        if not is_valid_id(frame.machine):
            return self._deny("bad_machine", "a machine id must have 1 to 64 letters, digits or dashes", final=True)
        return self._enrol_with_token(frame) if frame.token else self._enqueue_approval(frame, now)

    def _enrol_with_token(self, frame: Enroll) -> list[Frame]:
        tokens = self._cluster.tokens
        answer = tokens.check(frame.token, frame.mac, frame.csr)
        if answer is not Redemption.ACCEPTED:
            return self._deny(answer, MESSAGES[answer], final=True)
        try:
            extract_public_key(frame.csr)
        except CertificateRequestError as error:
            return self._deny("bad_request", str(error), final=True)
        before = self._find_unproven_member(frame)
        if before is not None and (self._is_linked(before) or not tokens.may_replace(frame.token)):
            return self._deny_machine_taken(before)
        tokens.redeem(frame.token, frame.mac, frame.csr)
        return self._admit_node(frame, "a token")

    def _find_unproven_member(self, frame: Enroll) -> MemberRow | None:
        """Return the member whose machine a request names. Return None without such a member.

        Return None also if the member's key signed the request, and neither member nor certificate is denied.
        """
        before = _find_member_on(frame.machine, self._cluster.store.members.values())
        proven = self._cluster.authority.identify_signer(frame.certificate, frame.csr, frame.proof)
        if before is None or (
            proven and proven[0] == before.node and not self._cluster.store.deny_list.is_denied(*proven)
        ):
            return None
        return before

    def _is_linked(self, member: MemberRow) -> bool:
        """Return whether a node with this machine id is linked now, in which case two machines use the id."""
        return bool(self._cluster.get_link_address(member.node))

    def _deny_machine_taken(self, before: MemberRow) -> list[Frame]:
        cluster, subject = self._cluster, f"{before.name} {before.node} from {self._address}"
        newest = cluster.store.audit[-1] if cluster.store.audit else None
        if newest is None or (newest.action, newest.subject) != ("refused to replace", subject):
            cluster.store.audit.add(cluster.clock(), "node", "refused to replace", subject, self._address)
        address = cluster.get_link_address(before.node)
        if address:
            return self._deny(
                "machine_taken",
                f"the machine id of this Mac is that of {before.name}, which is linked now from {address}: if two "
                "nodes run on this Mac, stop the other one; if the disk was cloned, give this Mac its own id "
                "with `--set node.machine=NAME`",
                final=True,
            )
        return self._deny(
            "machine_taken",
            f"this machine is {before.name} in the pool already, and that member's key did not sign the request: if it "
            f"lost its identity, an administrator runs `cluster node remove {before.name}` before it joins again, or "
            "approves its code when it joins without a token",
            final=True,
        )

    def _enqueue_approval(self, frame: Enroll, now: float) -> list[Frame]:
        if not self._commitment:
            return self._deny("token_needed", "neither a token nor a commitment was sent", final=True)
        opened = compute_commitment(frame.opening, frame.csr)
        if len(frame.opening) < NONCE_BYTES or not hmac.compare_digest(opened, self._commitment):
            return self._deny("commitment_broken", "nonce and request do not match the commitment", final=True)
        try:
            extract_public_key(frame.csr)
        except CertificateRequestError as error:
            return self._deny("bad_request", str(error), final=True)
        code = compute_short_code(self._cluster.authority.ca, frame.csr, frame.opening, self._nonce)
        hardware = sanitize_hardware(frame.hardware)
        before = self._find_unproven_member(frame)
        if before is not None and self._is_linked(before):
            return self._deny_machine_taken(before)
        self._replaces = before.node if before else None
        replaces = before.name if before else ""
        waiting = WaitingNode(
            code, frame.name, frame.machine, hardware, self._address, now + APPROVAL_TIMEOUT_SECONDS, replaces
        )
        approval = self._cluster.approvals.enqueue(waiting, now, self._wake)
        if not isinstance(approval, ApprovalRequest):
            message = "too many machines wait for an approval: try again later, or use a token"
            return self._deny("approvals_full", message, retry_after=approval)
        log.info("waiting for approval", name=frame.name, address=self._address)
        self._enroll, self._approval, self._stage, self.deadline = frame, approval, _Stage.PENDING, waiting.expires
        return [EnrollPending(APPROVAL_TIMEOUT_SECONDS)]

    def _admit_node(self, frame: Enroll, means: str) -> list[Frame]:
        cluster, store = self._cluster, self._cluster.store
        store.raise_failure()
        now = cluster.clock()
        before = _find_member_on(frame.machine, store.members.values())
        taken = [row.name for row in store.members.values() if row.removed is None and row is not before]
        node = before.node if before else NodeId(str(uuid.uuid4()))
        name = make_unique_name(frame.name, taken)
        certificate = cluster.authority.sign_request(frame.csr, node, name)
        how = means if self._find_unproven_member(frame) else "its own key"
        if before:
            store.deny_list.add_serial(before.serial, now, "the machine joined again")
            subject = f"{before.name} {before.node} from {self._address} by {how}"
            store.audit.add(now, "node", "replaced", subject, self._address)
        row = MemberRow(
            node,
            name,
            frame.machine,
            sanitize_hardware(frame.hardware),
            read_certificate(certificate).serial,
            now,
            cordoned=before.cordoned if before else False,
            labels=before.labels if before else (),
            video=before.video if before else False,
        )
        store.members.put(row)
        _rename_in_wishes(store, row.machine, node)
        store.audit.add(now, "node", "joined", f"{name} {node}", self._address)
        log.info("node enrolled", node=node, name=name, address=self._address, by=means, again=before is not None)
        cluster.on_enrolled(row)
        self.closed = True
        return [Enrolled(node, certificate, cluster.authority.cluster)]

    def _deny(self, reason: str, message: str, *, final: bool = False, retry_after: float = 0.0) -> list[Frame]:
        log.warning("enrolment refused", address=self._address, why=reason)
        self.withdraw()
        return [Denied(reason, message, final, retry_after)]


def make_unique_name(name: str, taken: Collection[str]) -> str:
    """Return `name`, or the first of `name-2`, `name-3` … that is not in `taken`. Case is ignored.

    The result has at most 63 characters.
    """
    used = {other.casefold() for other in taken}
    candidate, number = name, 1
    while candidate.casefold() in used:
        number += 1
        suffix = f"-{number}"
        candidate = name[: 63 - len(suffix)] + suffix
    return candidate


def _find_member_on(machine: str, rows: Collection[MemberRow]) -> MemberRow | None:
    """Return the current member with this machine id; None if there is none.

    A machine that joins again keeps its node id. After a removal it becomes a new node, and the old id stays denied.
    """
    return next((row for row in rows if row.machine == machine and row.removed is None), None)


def _rename_in_wishes(store: Database, machine: str, node: NodeId) -> None:
    """Put a machine's new node in the place of its removed nodes in the node lists of all wishes."""
    removed = {row.node for row in store.members.values() if row.machine == machine and row.removed is not None}
    for wish in tuple(store.wishes.values()):
        if removed.intersection((*wish.allow, *wish.deny)):
            allow, deny = (
                tuple(sorted({node if listed in removed else listed for listed in nodes}))
                for nodes in (wish.allow, wish.deny)
            )
            store.wishes.put(structs.replace(wish, allow=allow, deny=deny))


def sanitize_hardware(hardware: Hardware) -> Hardware:
    """Return a machine's hardware description with safe texts, and with 0 in place of negative numbers.

    Texts have at most 64 ASCII characters; `?` replaces any other character (`wire.bonjour_record.sanitize_text`).
    """
    chip, system, python = sanitize_text(hardware.chip), sanitize_text(hardware.system), sanitize_text(hardware.python)
    return Hardware(chip, max(0, hardware.memory), max(0, hardware.cores), system, python)
