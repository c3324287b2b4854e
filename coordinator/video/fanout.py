"""Fan-out of the registry's callbacks to the dispatcher and to the controllers of videos and pulls."""

from collections.abc import Callable, Mapping
from typing import Any

from coordinator.cluster.registry import RegistryListener
from coordinator.models.pull_controller import MODEL_ORDER_FRAMES, PullController
from coordinator.video.controller import LEASE_FRAMES, VideoController
from router.placement.cluster_view import ClusterView
from wire.frames import Frame
from wire.identity import NodeId


class ListenerFanout:
    """Listener of the registry (`RegistryListener`) that forwards to the dispatcher and to two controllers.

    The video controller gets frames about leases, the pull controller frames about orders for model files, and the
    dispatcher all other frames. `on_view` is called after each new view, for example to wake the wish runner.
    """

    def __init__(
        self,
        dispatcher: RegistryListener,
        controller: VideoController,
        pulls: PullController,
        on_view: Callable[[], object],
    ) -> None:
        self._dispatcher = dispatcher
        self._controller = controller
        self._pulls = pulls
        self._on_view = on_view
        self.receivers: Mapping[type[Frame], Callable[[NodeId, Any], None]] = {
            **dispatcher.receivers,
            **dict.fromkeys(LEASE_FRAMES, controller.handle_frame),
            **dict.fromkeys(MODEL_ORDER_FRAMES, pulls.handle_frame),
        }

    def set_view(self, view: ClusterView) -> None:
        """Pass a new cluster view to the dispatcher and the controllers, then call `on_view`."""
        self._dispatcher.set_view(view)
        self._controller.apply_view(view)
        self._pulls.apply_view(view)
        self._on_view()

    def handle_lost_node(self, node: NodeId, reason: str) -> None:
        """Report the end of a node's link to the dispatcher and both controllers.

        Only the dispatcher gets `reason`.
        """
        self._dispatcher.handle_lost_node(node, reason)
        self._controller.handle_node_gone(node)
        self._pulls.handle_lost_node(node)

    def remove_node(self, node: NodeId) -> None:
        """Delete the data of a former member from the dispatcher and the controllers.

        Its video jobs are requeued or fail. Its quantizations end, and open pulls fail on this node only.
        """
        self._dispatcher.remove_node(node)
        self._controller.delete_node_data(node)
        self._pulls.remove_node(node)
