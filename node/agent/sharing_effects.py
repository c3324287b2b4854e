"""Apply the sharing rule to a node: end requests and leases, release memory, and notify of the decision."""

from collections.abc import Callable

from node.agent.links import CoordinatorLinks
from node.engine_process.supervisor import Supervisor
from node.hub.quantization.quantizer import Quantizer
from node.notifier import Notifier
from node.sharing.policy import Occupancy, SharingAction, SharingState
from node.video.lease_manager import LeaseManager
from wire.codec import encode
from wire.frames import Cancel


class SharingEffects:
    """Implementation of `SharingTarget`: applies decisions to the requests, leases, quantization and engine of a node.

    `on_sharing(reason)` is called when this node stops sharing, and with an empty text when it shares again.
    """

    def __init__(
        self,
        links: CoordinatorLinks,
        supervisor: Supervisor,
        lease_manager: LeaseManager,
        quantizer: Quantizer,
        on_sharing: Callable[[str], None],
    ) -> None:
        self._links = links
        self._supervisor = supervisor
        self._lease_manager = lease_manager
        self._quantizer = quantizer
        self._on_sharing = on_sharing
        self.changed = Notifier()
        """Notifies after each changed decision."""

    def read_occupancy(self) -> Occupancy:
        """Return the current use of this node: open requests, leased memory, and whether the engine rests."""
        leased = self._lease_manager.holding or self._quantizer.holding
        return Occupancy(self._links.open_requests, leased, self._supervisor.resting)

    def on_sharing_change(self, sharing: SharingState) -> None:
        """Notify `on_sharing` and the subscribers of `changed` of a new decision whether this Mac accepts work.

        While this Mac accepts no work, no process of a quantization starts (`Quantizer.pause`).
        """
        why = "" if sharing.shared else sharing.why
        self._on_sharing(why)
        self._quantizer.pause(why)
        self.changed.notify()

    def apply_sharing_action(self, act: SharingAction, sharing: SharingState) -> None:
        """Perform an action of the sharing rule. `sharing.why` is the reason given to clients and jobs.

        `END_REQUESTS` fails all open requests with `node_stopping`; the coordinator may resume them on another node.
        `END_LEASE` ends the lease of a video job or a quantization. `REST` releases the memory of the engine, and
        `WAKE` allows model loads again.
        """
        match act:
            case SharingAction.END_REQUESTS:
                for request in self._links.fail_all(f"its Mac stopped sharing: {sharing.why}"):
                    self._supervisor.send(encode(Cancel(request)), Cancel, request)
            case SharingAction.END_LEASE:
                self._lease_manager.end(sharing.why)
                self._quantizer.end(sharing.why)
            case SharingAction.REST:
                self._supervisor.release_memory()
            case SharingAction.WAKE:
                self._supervisor.wake()
