"""What the router counts. Plain numbers on one loop; the coordinator exports them."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Totals since the start; `seconds` and `tokens` are sums, divide by their counts for a mean."""

    requests: dict[str, int] = field(default_factory=dict[str, int])
    """Ended requests by outcome: `ok`, `cancelled`, or the code of the refusal or failure."""
    answers: dict[int, int] = field(default_factory=dict[int, int])
    """HTTP answers of the model routes by status; 499 is a client that left before one."""
    refusals: dict[str, int] = field(default_factory=dict[str, int])
    """Refusals by nodes, by code; a request may meet several and still be answered."""
    attempts: int = 0
    retries: int = 0
    """Attempts beyond the first of a request."""
    nodes_lost: int = 0
    """Requests that were on a node when it was lost."""
    resumes: int = 0
    """Answers that were begun and went on on another node."""
    moves: int = 0
    """Requests taken off a node that drains or fell silent."""
    slow_clients: int = 0
    queue_entries: int = 0
    queue_seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_tokens: int = 0
    first_token_seconds: float = 0.0
    durations: int = 0
    duration_seconds: float = 0.0

    def ended(self, outcome: str) -> None:
        """Count one ended request."""
        self.requests[outcome] = self.requests.get(outcome, 0) + 1

    def answered(self, status: int) -> None:
        """Count one HTTP answer."""
        self.answers[status] = self.answers.get(status, 0) + 1

    def refused(self, code: str) -> None:
        """Count one refusal by a node."""
        self.refusals[code] = self.refusals.get(code, 0) + 1
