"""Answers to members that read parts of the API over the cluster port, with their node's certificate."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from coordinator.cluster.member_authentication import MemberAuthentication
from wire.bonjour_record import sanitize_text
from wire.frames import Denied, MemberQuery
from wire.identity import PeerIdentity


class MemberQueries:
    """API paths that members may read, with the functions that return their contents. Empty before `offer`."""

    def __init__(self, authentication: MemberAuthentication) -> None:
        self._authentication = authentication
        self._contents: Mapping[str, Callable[[], Mapping[str, Any]]] = {}

    @property
    def paths(self) -> frozenset[str]:
        """Paths that members may read."""
        return frozenset(self._contents)

    def offer(self, contents: Mapping[str, Callable[[], Mapping[str, Any]]]) -> None:
        """Replace the API paths that members may read, each with the function that returns its content."""
        self._contents = contents

    def answer(self, peer: PeerIdentity, serial: str, query: MemberQuery) -> bytes | Denied:
        """Return the content of an API path as JSON, or `Denied` with the reason.

        `peer` and `serial` (hex) are identity and serial number of the peer's certificate. Peers that are not members
        and paths that are not offered are denied.
        """
        row = self._authentication.authenticate(peer, serial, query.node, query.machine)
        if isinstance(row, Denied):
            return row
        get_content = self._contents.get(query.path)
        if get_content is None:
            paths = ", ".join(sorted(self._contents)) or "nothing yet"
            return Denied(
                "not_readable", f"a member may read {paths}, not {sanitize_text(query.path)[:80]}", final=True
            )
        return json.dumps(get_content()).encode()
