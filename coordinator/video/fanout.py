"""Forwards the registry's callbacks to both the dispatcher and the video controller."""

from coordinator.cluster.registry import RegistryListener
from coordinator.video.controller import LEASE_FRAMES, VideoController
from router.placement.cluster_view import ClusterView
from wire.frames import Frame
from wire.identity import NodeId


class ListenerFanout:
    """Implements `coordinator.cluster.registry.RegistryListener`.

    The video controller receives leases, the dispatcher all other frames.
    """

    def __init__(self, dispatcher: RegistryListener, controller: VideoController) -> None:
        self._dispatcher = dispatcher
        self._controller = controller

    def set_view(self, view: ClusterView) -> None:
        """The picture of the cluster changed."""
        self._dispatcher.set_view(view)
        self._controller.apply_view(view)

    def receive(self, node: NodeId, frame: Frame) -> None:
        """A node said something."""
        if isinstance(frame, LEASE_FRAMES):
            self._controller.handle_frame(node, frame)
        else:
            self._dispatcher.receive(node, frame)

    def node_gone(self, node: NodeId, reason: str) -> None:
        """A node's link ended."""
        self._dispatcher.node_gone(node, reason)
        self._controller.node_gone(node)

    def forget(self, node: NodeId) -> None:
        """It is no member any more."""
        self._dispatcher.forget(node)
        self._controller.forget(node)
