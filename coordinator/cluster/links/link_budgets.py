"""Rate limits of a node for frames, reports, renewals and links. Pure: `now` is monotonic seconds.

A budget belongs to a node, not to a link, because a new link must not bring a new budget. The rates are several times
those of a correct node with its fastest settings: 20 reports a second, and a certificate renewal every two months.
"""

from wire.frames import (
    TAGS,
    Goodbye,
    LeaseEnded,
    LeaseGranted,
    LeaseRefused,
    ModelOrderEnded,
    ModelOrderProgress,
    RenewCertificate,
    Report,
)

FRAMES_PER_SECOND, FRAMES_BURST = 10_000.0, 5_000.0
"""Maximum frames of all kinds per second, and in one burst."""
REPORTS_PER_SECOND, REPORTS_BURST = 60.0, 240.0
"""Maximum reports per second, and in one burst."""
REPORT_BYTES_PER_SECOND, REPORT_BYTES_BURST = 1.0 * 2**20, 2.0 * 2**20
"""Maximum bytes of reports per second, and in one burst."""
RENEWALS_PER_SECOND, RENEWALS_BURST = 0.1, 5.0
"""Maximum renewals of certificates per second, and in one burst."""
LOGGED_PER_SECOND, LOGGED_BURST = 20.0, 100.0
"""Maximum frames per second, and in one burst, of the types that write a line to the log for each frame."""
PROGRESS_PER_SECOND, PROGRESS_BURST = 100.0, 400.0
"""Maximum frames `ModelOrderProgress` per second, and in one burst. A node sends 2 per second for each order."""
LINKS_PER_SECOND, LINKS_BURST = 1.0, 30.0
"""Maximum new links per second, and in one burst."""
QUERIES_PER_SECOND, QUERIES_BURST = 10.0, 60.0
"""Maximum queries and connections for relays per second, and in one burst."""
BUDGET_RETRY_SECONDS = 5.0
"""Seconds until a node that exceeded a budget may retry, as `retry_after` of the denial."""
_TAG_OF = {kind: tag for tag, kind in TAGS.items()}
_LOGGED = frozenset(_TAG_OF[kind] for kind in (Goodbye, LeaseGranted, LeaseRefused, LeaseEnded, ModelOrderEnded))
_REPORT, _RENEW, _PROGRESS = _TAG_OF[Report], _TAG_OF[RenewCertificate], _TAG_OF[ModelOrderProgress]

BUDGETED = _LOGGED | {_REPORT, _RENEW, _PROGRESS}
"""Tags of the frames that have a budget in addition to the budget of all frames."""


class LinkBudget:
    """Token bucket for frames or links of one node: at most `burst` tokens, refilled with `rate` tokens per second.

    `subject` is the name of the limited units in error texts, such as `frames`.
    """

    __slots__ = ("_at", "_burst", "_left", "_rate", "_subject")

    def __init__(self, subject: str, rate: float, burst: float) -> None:
        self._subject = subject
        self._rate = rate
        self._burst = self._left = burst
        self._at = 0.0

    def charge(self, now: float, cost: float = 1.0) -> str:
        """Take `cost` tokens at `now` (monotonic seconds) and return an empty string.

        If fewer tokens are left, take none and return an error text.
        """
        filled = self._left + (now - self._at) * self._rate
        left = (filled if filled < self._burst else self._burst) - cost
        self._at = now
        if left < 0:
            self._left = left + cost
            return f"too many {self._subject}: {self._rate:g} a second, {self._burst:g} at once"
        self._left = left
        return ""


class NodeBudgets:
    """Token buckets of one node, which persist across its links."""

    __slots__ = ("_links", "_logged", "_progress", "_queries", "_renewals", "_report_bytes", "_reports", "frames")

    def __init__(self) -> None:
        self.frames = LinkBudget("frames", FRAMES_PER_SECOND, FRAMES_BURST)
        """Budget of all frames. A frame whose tag is not in `BUDGETED` is charged to no other budget."""
        self._reports = LinkBudget("reports", REPORTS_PER_SECOND, REPORTS_BURST)
        self._report_bytes = LinkBudget("bytes of reports", REPORT_BYTES_PER_SECOND, REPORT_BYTES_BURST)
        self._logged = LinkBudget("leases, goodbyes and ends of orders", LOGGED_PER_SECOND, LOGGED_BURST)
        self._progress = LinkBudget("reports of progress", PROGRESS_PER_SECOND, PROGRESS_BURST)
        self._renewals = LinkBudget("renewals", RENEWALS_PER_SECOND, RENEWALS_BURST)
        self._links = LinkBudget("links", LINKS_PER_SECOND, LINKS_BURST)
        self._queries = LinkBudget("queries", QUERIES_PER_SECOND, QUERIES_BURST)

    def charge_link(self, now: float) -> str:
        """Count a new link at `now` (monotonic seconds).

        Return an error text if the link exceeds the budget, else an empty string.
        """
        return self._links.charge(now)

    def charge_query(self, now: float) -> str:
        """Count a query, or a connection for a relay, with this node's certificate at `now` (monotonic seconds).

        Return an error text if the query or connection exceeds the budget, else an empty string.
        """
        return self._queries.charge(now)

    def charge_frame(self, tag: int, size_bytes: int, now: float) -> str:
        """Count a frame before it is decoded. Return an error text if the frame exceeds a budget, else an empty string.

        `tag` is the tag of the frame's type, `size_bytes` the size of its body. `now` is in monotonic seconds.
        """
        why = self.frames.charge(now)
        if why or tag not in BUDGETED:
            return why
        if tag == _REPORT:
            return self._reports.charge(now) or self._report_bytes.charge(now, size_bytes)
        if tag == _PROGRESS:
            return self._progress.charge(now)
        return self._renewals.charge(now) if tag == _RENEW else self._logged.charge(now)
