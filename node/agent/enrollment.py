"""Node's side of enrollment: how a machine becomes a node. Counterpart: `coordinator.joining.enrollment`.

Enrollment takes two connections. The first accepts any certificate and only fetches the CA, which is compared with the
token's pin. The second verifies the coordinator with that CA and carries the certificate request. Without a token there
is no pin. Both screens then show a code derived from the CA, the request and both nonces, and a person compares it. The
node commits to its nonce and its request before it receives the coordinator's nonce.
"""

import asyncio
import errno
import hashlib
import hmac
import re
import secrets
import ssl
import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import structlog
from msgspec.structs import replace

from node.agent.host_dialer import dial_host
from node.agent.identity import (
    IdentityError,
    IdentityMismatch,
    NodeIdentity,
    create_authority_context,
    create_client_context,
    install_certificate,
    load_identity,
    needs_renewal,
    new_csr,
    new_request,
    prove_identity,
    proves_coordinator,
    store_address,
    store_identity,
)
from node.agent.machine_id import compute_machine_id
from wire.certificate import explain_wrong_clock
from wire.codec import Splitter, WireError, decode, encode
from wire.frames import Denied, Enroll, EnrollAuthority, Enrolled, EnrollPending, EnrollStart, Frame
from wire.identity import PROTOCOL, is_valid_id
from wire.join_token import JoinToken, compute_request_mac, derive_token_key
from wire.pairing_code import compute_commitment, compute_short_code
from wire.report import Hardware
from wire.units import KIB

__all__ = [
    "CoordinatorUnreachable",
    "EnrollDenied",
    "EnrollError",
    "IdentityError",
    "IdentityMismatch",
    "NodeIdentity",
    "PinMismatch",
    "compute_machine_id",
    "create_client_context",
    "enroll",
    "install_certificate",
    "load_identity",
    "needs_renewal",
    "new_csr",
    "parse_address",
    "proves_coordinator",
    "proves_itself",
    "store_address",
]

log = structlog.get_logger("node.agent.enrollment")

DEFAULT_PORT = 8081
ANSWER_TIMEOUT_SECONDS = 10.0
"""Timeout of the connection, and of an answer that needs no person, in seconds.

An answer that needs a person may take the time that the person has plus this timeout.
"""
MAX_ANSWER_BYTES = 16 * KIB
"""Maximum bytes that the coordinator may answer on one connection of enrollment."""

_ADDRESS = re.compile(r"(?:[a-z+]+://)?(?:\[([0-9A-Fa-f:.%A-Za-z]+)\]|([^\s:/\[\]]+))(?::(\d{1,5}))?/?")

F = TypeVar("F", bound=Frame)


class EnrollError(Exception):
    """Raised if joining failed. The text names the reason and the next step."""


class CoordinatorUnreachable(EnrollError):
    """Raised if nothing answers at the address, or if the answer is not that of a coordinator."""


class PinMismatch(EnrollError):
    """Raised if the coordinator's CA is not the one in the token, or changed between two connections.

    The cluster is the wrong one, or an attacker is on the network.
    """


class EnrollDenied(EnrollError):
    """Raised if the coordinator denied the enrollment.

    `reason`, `message`, `final` and `retry_after` (seconds) are the fields of its `wire.frames.Denied`.
    """

    def __init__(self, denied: Denied) -> None:
        super().__init__(denied.message)
        self.reason = denied.reason
        self.message = denied.message
        self.final = denied.final
        self.retry_after = denied.retry_after


def parse_address(text: str) -> tuple[str, int]:
    """Parse `host`, `host:port` or `[v6]:port`, with or without a scheme. Return host and port.

    The default port is `DEFAULT_PORT`. Raise `EnrollError` with the accepted form for other texts.
    """
    match = _ADDRESS.fullmatch(text.strip())
    port = int(match[3] or DEFAULT_PORT) if match else 0
    if match is None or not 0 < port < 65536:
        raise EnrollError(f"{text!r} is not an address: write HOST:PORT, as printed by `cluster up`")
    return match[1] or match[2], port


async def enroll(
    url: str,
    token: JoinToken | None,
    *,
    name: str,
    machine: str,
    hardware: Hardware,
    folder: Path,
    on_code: Callable[[str, float], None],
) -> NodeIdentity:
    """Join the cluster whose coordinator listens at `url` (`host:port`).

    Store the new identity in `folder` and return it. An identity in the folder, such as a cloned or a damaged one, is
    replaced after the coordinator has agreed. `name` is the display name, `machine` the machine id. Without a token
    (None), a person must approve the node: `on_code` is called with the six digits to show and the seconds that the
    person has. The call then waits until the person decides or that time has passed. Any other answer of the
    coordinator must come within `ANSWER_TIMEOUT_SECONDS`.

    Raise `EnrollError` for an invalid address, `CoordinatorUnreachable` without an answer of a coordinator,
    `PinMismatch` for a wrong CA, and `EnrollDenied` for a denial. Raise `IdentityError` if the certificate received is
    not for this request, `OSError` if the identity cannot be written.
    """
    host, port = parse_address(url)
    authority = await _fetch_authority(host, port)
    if token is not None and not hmac.compare_digest(hashlib.sha256(authority.ca).digest(), token.pin):
        raise PinMismatch(
            "the coordinator is not the one that made the token: wrong address, or an attacker is on the network. "
            "Nothing was sent to it"
        )
    request = new_request(name)
    nonce = secrets.token_bytes(16)
    async with _connect(host, port, _create_trusting_context(authority)) as line:
        if not proves_coordinator(line.tls, authority.cluster):
            raise CoordinatorUnreachable(f"{_format_address(host, port)} has a certificate that is not a coordinator's")
        await line.send(EnrollStart(PROTOCOL, b"" if token else compute_commitment(nonce, request.csr)))
        again = await line.receive(EnrollAuthority)
        if again.ca != authority.ca:
            raise PinMismatch("the coordinator changed its CA between two connections")
        certificate, proof = prove_identity(folder, request.csr)
        enrol = Enroll(request.csr, name, machine, hardware, certificate=certificate, proof=proof)
        enrolled = (
            await _with_token(line, enrol, token) if token else await _with_code(line, enrol, nonce, again, on_code)
        )
    identity = store_identity(folder, request, enrolled.certificate, authority.cluster, authority.ca, machine)
    return store_address(identity, _format_address(host, port))


async def has_authority(address: str, pin: bytes | None) -> bool:
    """Return whether a coordinator answers at `address` (`host:port`), with the CA of the SHA-256 `pin`; None for any.

    The answer of a coordinator is not proven. Return False if the connection fails or takes more than
    `ANSWER_TIMEOUT_SECONDS`.
    """
    try:
        authority = await _fetch_authority(*parse_address(address))
    except EnrollError:
        return False
    return pin is None or hmac.compare_digest(hashlib.sha256(authority.ca).digest(), pin)


async def proves_itself(identity: NodeIdentity, address: str) -> bool:
    """Return whether the coordinator of this node answers at `address` (`host:port`), proven by its certificate.

    Return False if the connection fails or takes more than `ANSWER_TIMEOUT_SECONDS`. Return False, with a log line, if
    the certificate of this node cannot be loaded. Raise `ValueError` if the stored CA is no certificate.
    """
    try:
        context = create_client_context(identity)
    except OSError as error:
        log.warning("certificate of this node not loaded", folder=str(identity.folder), error=str(error))
        return False
    try:
        host, port = parse_address(address)
        async with _connect(host, port, context) as line:
            return proves_coordinator(line.tls, identity.cluster)
    except EnrollError:
        return False


async def _with_token(line: "_EnrollConnection", request: Enroll, token: JoinToken) -> Enrolled:
    mac = compute_request_mac(derive_token_key(token.secret), request.csr)
    await line.send(replace(request, token=token.id, mac=mac))
    return await line.receive(Enrolled)


async def _with_code(
    line: "_EnrollConnection",
    request: Enroll,
    nonce: bytes,
    authority: EnrollAuthority,
    on_code: Callable[[str, float], None],
) -> Enrolled:
    await line.send(replace(request, opening=nonce))
    pending = await line.receive(EnrollPending)
    on_code(compute_short_code(authority.ca, request.csr, nonce, authority.nonce), pending.seconds)
    return await line.receive(Enrolled, pending.seconds + ANSWER_TIMEOUT_SECONDS)


async def _fetch_authority(host: str, port: int) -> EnrollAuthority:
    """Fetch the CA over an unverified connection. Only a pin or a code makes the answer trustworthy.

    Raise `CoordinatorUnreachable` if the connection fails or the answer has no valid cluster id, `EnrollDenied` for a
    denial.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    async with _connect(host, port, context) as line:
        await line.send(EnrollStart(PROTOCOL))
        authority = await line.receive(EnrollAuthority)
    if not is_valid_id(authority.cluster):
        raise CoordinatorUnreachable("the coordinator sent no valid cluster id")
    return authority


def _create_trusting_context(authority: EnrollAuthority) -> ssl.SSLContext:
    try:
        return create_authority_context(authority.ca)
    except (ssl.SSLError, ValueError):
        raise CoordinatorUnreachable("the coordinator sent no certificate authority") from None


class _EnrollConnection:
    """One connection of enrollment, read and written frame by frame."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._splitter = Splitter(MAX_ANSWER_BYTES, MAX_ANSWER_BYTES)
        self._frames: list[Frame] = []
        self.tls: ssl.SSLObject = writer.get_extra_info("ssl_object")

    async def send(self, frame: Frame) -> None:
        self._writer.write(encode(frame))
        await self._writer.drain()

    async def receive(self, kind: type[F], seconds: float = ANSWER_TIMEOUT_SECONDS) -> F:
        """Return the next frame, which must be of this kind.

        Raise `EnrollDenied` for a denial, `WireError` for other frames. Raise `CoordinatorUnreachable` if the
        connection ends, `TimeoutError` after `seconds`.
        """
        async with asyncio.timeout(seconds):
            while not self._frames:
                data = await self._reader.read(MAX_ANSWER_BYTES)
                if not data:
                    raise CoordinatorUnreachable("the coordinator closed the connection without an answer")
                self._frames += [decode(tag, body) for tag, body in self._splitter.feed(data)]
        frame = self._frames.pop(0)
        if isinstance(frame, Denied):
            raise EnrollDenied(frame)
        if not isinstance(frame, kind):
            raise WireError(f"{type(frame).__name__} instead of {kind.__name__}")
        return frame


@asynccontextmanager
async def _connect(host: str, port: int, context: ssl.SSLContext) -> AsyncGenerator[_EnrollConnection]:
    where = _format_address(host, port)
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_SECONDS):
            line = await dial_host(host, port)
            reader, writer = await asyncio.open_connection(sock=line, ssl=context, server_hostname="")
        yield _EnrollConnection(reader, writer)
    except ssl.SSLError as error:
        reason = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else error.reason or error
        raise CoordinatorUnreachable(
            f"{where} does not speak the cluster's TLS: {reason}{explain_unreachable(error)}"
        ) from None
    except WireError as error:
        raise CoordinatorUnreachable(f"{where} does not respond as a coordinator: {error}") from None
    except TimeoutError:
        raise CoordinatorUnreachable(f"{where} did not answer in time") from None
    except UnicodeError:
        raise CoordinatorUnreachable(f"{where} cannot be reached: its host name is not valid") from None
    except OSError as error:
        raise CoordinatorUnreachable(
            f"{where} cannot be reached: {error.strerror or error}{explain_unreachable(error)}; "
            "is `cluster up` running there, and is this its address for nodes?"
        ) from None
    finally:
        if writer is not None:
            writer.transport.abort()


def explain_unreachable(error: Exception) -> str:
    """Return a hint with the next step for an error of a connection; empty for most errors.

    Without the local-network permission on macOS 15 and later, connections to all addresses of the LAN fail with
    EHOSTUNREACH. A program that was started over SSH loses the permission when the session ends. If the clock here or
    at the coordinator is wrong, the coordinator's certificate seems not yet valid or expired.

    Source: https://github.com/NVIDIA/Personal-AI-Router/issues/3
    """
    if sys.platform == "darwin" and isinstance(error, OSError) and error.errno == errno.EHOSTUNREACH:
        return (
            " (allow this program under System Settings, Privacy & Security, Local Network, or run it as a service: "
            "`cluster service install`)"
        )
    return explain_wrong_clock(error, time.time())


def _format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
