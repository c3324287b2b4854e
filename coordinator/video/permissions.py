"""Permissions for video jobs: sent to a node that reports another permission, once over each link."""

from collections.abc import Callable

from router.placement.cluster_view import NodeView
from wire.frames import AllowVideo, Frame
from wire.identity import NodeId


class VideoPermissions:
    """Permissions that were sent to nodes.

    `send` sends a frame to a node and returns False if the node is not linked. Without `enabled`, no node has
    permission.
    """

    def __init__(self, send: Callable[[NodeId, Frame], bool], *, enabled: bool) -> None:
        self._send = send
        self._enabled = enabled
        self._sent: dict[NodeId, tuple[int, bool]] = {}
        """By node: the epoch of its link, and the permission last sent over it."""

    def send_to(self, node: NodeView) -> None:
        """Send a node its video permission if the node reports another one, once over each link.

        Nothing is sent to an older node, which reports no permission (`VideoState.allowed` is None).
        """
        allowed = node.video_allowed and self._enabled
        if node.video.allowed in (None, allowed) or self._sent.get(node.id) == (node.epoch, allowed):
            return
        if self._send(node.id, AllowVideo(allowed)):
            self._sent[node.id] = node.epoch, allowed

    def delete(self, node: NodeId) -> None:
        """Delete the data of a node that has left the pool."""
        self._sent.pop(node, None)
