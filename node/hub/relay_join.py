"""Open connections that the coordinator joins with a connection of another node, to transfer the files of a model."""

import socket
import ssl

from node.hub.child_messages import ClusterFiles
from node.hub.serving.node_tls import NodeClientContext
from wire.codec import Splitter, WireError, decode, encode
from wire.frames import Denied, JoinRelay, RelayJoined
from wire.identity import PROTOCOL

RELAY_JOINED = encode(RelayJoined())
"""Bytes of the frame after which all bytes come from the other node."""
RECEIVE_BYTES = 4096


class RelayRefusedError(ConnectionError):
    """Raised if the coordinator does not join the connection. `is_final` is whether a retry has the same result."""

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final


class RelayAnswer:
    """Parser of the bytes that a connection receives from the coordinator until it is joined."""

    def __init__(self) -> None:
        self._received = bytearray()

    def feed(self, data: bytes) -> bytes | None:
        """Add received bytes. Return the bytes after RelayJoined; None until that frame is complete.

        Raise `RelayRefusedError` if the coordinator refuses the connection or sends anything else.
        """
        self._received += data
        if self._received.startswith(RELAY_JOINED):
            return bytes(self._received[len(RELAY_JOINED) :])
        try:
            for tag, body in Splitter().feed(self._received):
                frame = decode(tag, body)
                if isinstance(frame, Denied):
                    raise RelayRefusedError(frame.message, is_final=frame.final)
                raise RelayRefusedError(f"the coordinator answered {type(frame).__name__}", is_final=True)
        except WireError as error:
            raise RelayRefusedError(f"the coordinator sent a {error}", is_final=True) from None
        return None


def build_join(cluster: ClusterFiles, token: str, *, serves: bool) -> bytes:
    """Return the encoded `JoinRelay` frame that begins a connection for the transfer with this token.

    `serves` is whether this node serves the files; otherwise it receives them.
    """
    return encode(JoinRelay(PROTOCOL, cluster.node, cluster.machine, token, serves))


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of `host:port`, without the brackets of an IPv6 host. Raise `ValueError` for other texts."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"{address!r} is not host:port")
    return host.strip("[]"), int(port)


def open_relay(cluster: ClusterFiles, token: str, timeout: float) -> ssl.SSLSocket:
    """Open a connection through the coordinator to the node that serves the transfer with this token, and return it.

    The call blocks; `timeout` limits each socket operation, in seconds. Raise `OSError` (such as `RelayRefusedError` or
    `ssl.SSLError`) if the connection fails or is not joined. Raise `ValueError` for an invalid address or certificate.
    """
    context = NodeClientContext.create_for_coordinator(cluster)
    plain = socket.create_connection(split_address(cluster.coordinator), timeout)
    try:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = context.wrap_socket(plain)
    except BaseException:
        plain.close()
        raise
    try:
        connection.sendall(build_join(cluster, token, serves=False))
        answer = RelayAnswer()
        while answer.feed(_receive(connection)) is None:
            pass
    except BaseException:
        connection.close()
        raise
    return connection


def _receive(connection: ssl.SSLSocket) -> bytes:
    data = connection.recv(RECEIVE_BYTES)
    if not data:
        raise RelayRefusedError("the coordinator closed the connection")
    return data
