"""Table of the open links of nodes: the newest link of each node, and older links that a takeover has retired.

A new connection of a node replaces and closes the older one. With `takeover` from the same agent instance, the older
connection stays open at first. It ends when the node closes it or opens a third one, or when the requests of the node
are resumed.
"""

from coordinator.cluster.links.link_connection import Connection
from wire.frames import Denied, Frame, Hello
from wire.identity import NodeId


class LinkTable:
    """Open links by node. Frames to a node are sent on its newest link.

    In all methods, `reason` is a text for the log that explains why a link ends.
    """

    def __init__(self) -> None:
        self._newest: dict[NodeId, Connection] = {}
        self._retired: set[Connection] = set()

    def add(self, node: NodeId, connection: Connection, hello: Hello) -> None:
        """Make a connection the newest link of a node.

        If the node has an older link, retire it at a `takeover` by the same agent instance, and close it otherwise.
        """
        older = self._newest.get(node)
        if older is not None:
            self._replace(older, hello)
        self._newest[node] = connection

    def _replace(self, older: Connection, hello: Hello) -> None:
        same = older.hello is not None and older.hello.instance == hello.instance
        if same and hello.takeover:
            for retired in [link for link in self._retired if link.node == older.node]:
                retired.close("a third connection of the same node replaced this one")
            self._retired.add(older)
        else:
            del self._newest[NodeId(hello.node)]
            older.close("a newer connection of the same node replaced this one")

    def remove(self, node: NodeId, connection: Connection) -> None:
        """Remove a closed link of a node."""
        self._retired.discard(connection)
        if self._newest.get(node) is connection:
            del self._newest[node]

    def send(self, node: NodeId, frame: Frame) -> bool:
        """Send a frame on the node's newest link. Return False if there is none or the link is closed."""
        link = self._newest.get(node)
        return link is not None and link.send(frame)

    def send_to_all(self, frame: Frame) -> None:
        """Send a frame to every node, on its newest link."""
        for link in self._newest.values():
            link.send(frame)

    def get_address(self, node: NodeId) -> str:
        """Return the IP address of the peer of a node's newest link; empty if there is none."""
        link = self._newest.get(node)
        return "" if link is None else link.address

    def get_hello(self, node: NodeId) -> Hello | None:
        """Return the Hello of a node's newest link; None if there is none."""
        link = self._newest.get(node)
        return None if link is None else link.hello

    def disconnect_node(self, node: NodeId, reason: str, denied: Denied) -> None:
        """Send `denied` on every link of a node and close the links."""
        for link in self._list_links():
            if link.node == node:
                link.send(denied)
                link.close(reason)

    def close_link(self, node: NodeId, number: int, reason: str) -> None:
        """Abort the link `number` of a node, if it is open."""
        for link in self._list_links():
            if link.node == node and link.number == number:
                link.abort(reason)

    def abort_retired_links(self, node: NodeId, reason: str) -> None:
        """Abort the older links of a node that newer ones have replaced."""
        for link in [link for link in self._retired if link.node == node]:
            link.abort(reason)

    def close(self, reason: str) -> None:
        """Close every link, including replaced ones. `reason` is the reason for the log."""
        for link in self._list_links():
            link.close(reason)

    def _list_links(self) -> list[Connection]:
        return [*self._newest.values(), *self._retired]

    def __len__(self) -> int:
        return len(self._newest)

    @property
    def retired(self) -> int:
        """Number of open links that a newer link of the same node has replaced."""
        return len(self._retired)

    def get_certificate_validity(self) -> dict[NodeId, tuple[float, float]]:
        """Return the validity of each linked node's certificate: the times of issue and expiry, in Unix seconds."""
        return {node: link.certificate_validity for node, link in self._newest.items()}
