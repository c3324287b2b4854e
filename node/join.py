"""Join the cluster at the start of a node: load the node's identity, or find a cluster and enroll.

Without an address, the cluster is the only one that Bonjour finds. Of several clusters, it is the one that made the
join token.
"""

import sys
from collections.abc import Sequence
from importlib.metadata import version as installed
from pathlib import Path

from host.bonjour_announce import Announcement
from host.local_names import read_local_name
from host.node_marks import delete_left_mark
from node.agent import discovery, enrollment
from node.agent.discovery import DiscoveredService
from node.agent.enrollment import CoordinatorUnreachable, EnrollDenied, NodeIdentity, PinMismatch
from node.agent.machine_id import compute_machine_id
from node.agent.rejoin import load_known_identity
from node.node_lock import NodeStartError
from node.settings import NodeSettings, choose_node_name
from wire.bonjour_record import BonjourRecord
from wire.join_token import JoinToken, parse_token
from wire.report import Hardware

FIND_TIMEOUT_SECONDS = 5.0
"""Maximum duration of the search for a coordinator by Bonjour, in seconds."""


def read_token(descriptor: int | None) -> JoinToken | None:
    """Return the join token from a file descriptor, which is closed; None without a descriptor or for an empty text.

    Raise `NodeStartError` (exit code 4) for an invalid token.
    """
    if descriptor is None:
        return None
    with open(descriptor, encoding="utf-8") as pipe:
        text = pipe.read()
    try:
        return parse_token(text) if text.strip() else None
    except ValueError as error:
        raise NodeStartError(4, str(error)) from None


async def prepare_identity(
    state: Path,
    url: str | None,
    token: JoinToken | None,
    settings: NodeSettings,
    hardware: Hardware,
    *,
    may_enroll: bool,
) -> NodeIdentity:
    """Return the identity of this node in the state folder `state`, and enroll the node if it has none.

    `url` is the coordinator's address, which is stored; None for the stored address, or a search by Bonjour. Without a
    token, a person has to approve the enrollment.

    Raise `NodeStartError` (exit code 5) if the node has no identity and `may_enroll` is False, and (exit code 3 or 2)
    if not exactly one cluster is found. Raise `EnrollError`, `IdentityError` or `OtherClusterError` if the node cannot
    have an identity of this cluster.
    """
    folder = state / "node" / "identity"
    machine = compute_machine_id(settings.node.machine)
    known = load_known_identity(folder, machine, token)
    if known is not None:
        return enrollment.store_address(known, _normalize_address(url)) if url else known
    if not may_enroll:
        raise NodeStartError(5, f"there is no node in {state}")
    name = choose_node_name(settings, read_local_name())
    announcement = Announcement(BonjourRecord(role="new", version=installed("macpool")), name, machine, 9)
    announcement.start()
    try:
        if not url:
            services = await discovery.find_services(FIND_TIMEOUT_SECONDS)
            url = await find_answering(choose_cluster(services, token), token)
        identity = await enrollment.enroll(
            _normalize_address(url),
            token,
            name=name,
            machine=machine,
            hardware=hardware,
            folder=folder,
            on_code=_show_code,
        )
        delete_left_mark(folder.parent)
        return identity
    finally:
        await announcement.close()


def choose_cluster(services: Sequence[DiscoveredService], token: JoinToken | None) -> list[str]:
    """Return the addresses (`host:port`) of the only cluster among `services`, or of the one that made the token.

    Raise `NodeStartError` (exit code 3) without a service, and (exit code 2) for several clusters of which none made
    the token.
    """
    if token is not None:
        services = [one for one in services if one.fingerprint == token.pin.hex()[:16]] or services
    if not services:
        raise NodeStartError(
            3,
            "Bonjour found no cluster: run `cluster join HOST:8081 --token-file FILE` with the coordinator's address",
        )
    if len({service.cluster for service in services}) > 1:
        names = ", ".join(f"{service.name} at {' or '.join(service.candidates)}" for service in services)
        raise NodeStartError(2, f"Bonjour found several clusters, choose one by its address: {names}")
    return [address for service in services for address in service.candidates]


async def find_answering(addresses: Sequence[str], token: JoinToken | None) -> str:
    """Return the first address (`host:port`) at which a coordinator answers, with the CA of the token if there is one.

    A coordinator on several networks announces an address of each, and this machine may reach only some of them. If
    none answers, return the first of `addresses`, for which enrollment explains the failure.
    """

    async def is_coordinator(address: str) -> bool:
        return await enrollment.has_authority(address, token.pin if token is not None else None)

    return await discovery.find_first_proven(addresses, is_coordinator) or addresses[0]


def choose_exit_code(error: Exception) -> int:
    """Return the exit code of a failed enrollment."""
    if isinstance(error, EnrollDenied):
        return 8 if error.reason == "protocol" else 4
    return 9 if isinstance(error, PinMismatch) else 3 if isinstance(error, CoordinatorUnreachable) else 1


def _normalize_address(url: str) -> str:
    host, port = enrollment.parse_address(url)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _show_code(code: str, seconds: float) -> None:
    print(
        f"code {code}: on the coordinator run `cluster approve {code}` within {seconds / 60:.0f} minutes, if the list "
        "shows this machine",
        file=sys.stderr,
        flush=True,
    )
