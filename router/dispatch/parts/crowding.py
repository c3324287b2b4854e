"""Rules for API keys that request far more than their share.

Their requests are queued instead of being placed on a node with many waiting prompts. At its deadline, such a request
is refused if it would use memory that is kept for other keys.
"""

from router.admission.key_load import KeyLoad
from router.dispatch.active_request import ActiveRequest
from router.dispatch.parts.placer import Placer
from router.placement.candidate import Candidate
from router.placement.weights import QUEUE_BACKLOG_SECONDS, SPARE_MEMORY_SHARE


class CrowdRules:
    """Rules that let the requests of an API key wait, or end them, while the key requests far more than its share.

    The shares are computed from the expected tokens of all open requests (`KeyLoad`).
    """

    def __init__(self, placer: Placer) -> None:
        self._placer = placer
        self._load = KeyLoad()

    def add(self, request: ActiveRequest) -> None:
        """Add the expected tokens of an open request to those of its key."""
        self._load.add(request.weighted_key, request.estimated_tokens)

    def remove(self, request: ActiveRequest) -> None:
        """Subtract the expected tokens of a closed request from those of its key.

        Raise `KeyError` if the key has no open request.
        """
        self._load.drop(request.weighted_key, request.estimated_tokens)

    def must_wait(self, request: ActiveRequest, chosen: Candidate) -> bool:
        """Return whether a request must be queued although the node `chosen` has room for it.

        Return True if more than `QUEUE_BACKLOG_SECONDS` of prefill are ahead of it on the node, and the key exceeds its
        share of tokens (`KeyLoad.exceeds_share`). A request with a lost attempt need not wait, nor a request whose
        model the node must load.
        """
        model = chosen.model
        if request.life.lost_by is not None or model is None or not model.loaded:
            return False
        return chosen.tokens_ahead > QUEUE_BACKLOG_SECONDS * model.prefill_speed and self._load.exceeds_share(
            request.spec.key
        )

    def must_end(self, request: ActiveRequest, chosen: Candidate) -> bool:
        """Return whether a request must be refused at its deadline, because it would use memory kept for other keys."""
        return self.must_wait(request, chosen) and self._is_scarce(chosen)

    def _is_scarce(self, chosen: Candidate) -> bool:
        """Return whether a request would use memory for prompts and answers that its node keeps for other keys."""
        node = self._placer.view.find_node(chosen.node)
        loaded = sum(model.weights for model in node.models.values() if model.loaded) if node else 0
        return (chosen.headroom or 0) - chosen.need < SPARE_MEMORY_SHARE * (chosen.most_bytes - loaded)
