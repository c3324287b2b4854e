"""Requests of the dispatcher in a wanted state, by the events that lead there, and the models that a key may use."""

from router.admission.model_names import ModelNames, VisibleModels
from router.admission.rate_limits import KeyLimits
from router.dispatch.active_request import ActiveRequest
from router.dispatch.request import RequestFailure
from router.dispatch.request_events import AttemptLost, FirstTokens, Placed
from router.placement.candidate import Candidate
from router.placement.cluster_view import ClusterView
from router.placement.recovery import LossKind
from router.settings import RouterSettings
from wire.identity import NodeId


def send(request: ActiveRequest, node: str, attempt: int = 1, *, name: str = "", now: float = 0.0) -> None:
    """Send a request to a node with this attempt number; an earlier attempt is lost before."""
    if request.node is not None:
        request.step(AttemptLost(request.attempt, LossKind.NODE, RequestFailure("node_lost", "gone")), now)
    chosen = Candidate(node=NodeId(node), name=name or node, state="ready")
    request.step(Placed(attempt, attempt, chosen, 0), now)


def speak(request: ActiveRequest, now: float = 0.0) -> None:
    """Apply the first tokens of the current attempt of a request."""
    request.step(FirstTokens(request.attempt), now)


def list_visible(
    view: ClusterView, settings: RouterSettings | None = None, limits: KeyLimits | None = None
) -> VisibleModels:
    """Return the models and aliases of a view that a key with these limits may use."""
    return ModelNames(settings or RouterSettings()).list_visible(view, limits)
