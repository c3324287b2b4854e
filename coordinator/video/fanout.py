"""Forwards the registry's callbacks to the dispatcher, the video controller and the loop of the wishes."""

from collections.abc import Callable

from coordinator.cluster.registry import RegistryListener
from coordinator.video.controller import LEASE_FRAMES, VideoController
from router.placement.cluster_view import ClusterView
from wire.frames import Frame
from wire.identity import NodeId


class ListenerFanout:
    """Listener of the registry (`RegistryListener`) that forwards to the dispatcher and the video controller.

    The video controller receives frames about leases, the dispatcher all other frames. `on_view` is called after each
    new view.
    """

    def __init__(
        self, dispatcher: RegistryListener, controller: VideoController, on_view: Callable[[], object]
    ) -> None:
        self._dispatcher = dispatcher
        self._controller = controller
        self._on_view = on_view

    def set_view(self, view: ClusterView) -> None:
        """Pass a new cluster view to the dispatcher and the video controller."""
        self._dispatcher.set_view(view)
        self._controller.apply_view(view)
        self._on_view()

    def receive(self, node: NodeId, frame: Frame) -> None:
        """Pass a frame about a lease to the video controller, any other frame to the dispatcher."""
        if isinstance(frame, LEASE_FRAMES):
            self._controller.handle_frame(node, frame)
        else:
            self._dispatcher.receive(node, frame)

    def handle_lost_node(self, node: NodeId, reason: str) -> None:
        """Report the end of a node's link to the dispatcher, with its reason, and to the video controller."""
        self._dispatcher.handle_lost_node(node, reason)
        self._controller.handle_node_gone(node)

    def remove_node(self, node: NodeId) -> None:
        """Delete the data of a former member from the dispatcher and the video controller."""
        self._dispatcher.remove_node(node)
        self._controller.delete_node_data(node)
