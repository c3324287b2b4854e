"""Compute the statistics of simulation runs, one row for each policy, and render them as a table."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from router.dispatch.request import RequestFailure
from simulation.cluster import SimulatedPool
from simulation.outcomes import RequestOutcome
from wire.refusals import Refused


@dataclass(frozen=True, slots=True)
class RunStatistics:
    """Results of one policy in one scenario. Times are virtual, in seconds; `p50`, `p95` and `p99` are quantiles.

    Only requests that would fit alone on at least one node count, except in `requests`, `loads`, `preemptions` and
    `seconds`.
    """

    policy: str
    requests: int
    """Number of all requests."""
    fit: int
    """Number of requests that would fit alone on at least one node."""
    served: int
    """Number of complete answers."""
    ttft_p50: float
    """Median seconds from arrival to the first token. A request without a complete answer counts as infinite."""
    ttft_p95: float
    ttft_p99: float
    refused: int
    """Number of requests that ended with a refusal."""
    first_refused: float
    """Share, from 0 to 1, of the requests sent to any node whose first try was refused; 0 if none was sent."""
    failed: int
    """Number of requests that failed, or did not end."""
    whole_p50: float
    """Median seconds from arrival to the last token. A request without a complete answer counts as infinite."""
    whole_p95: float
    wait_p50: float
    """Median seconds from arrival to the last try before the first token, for complete answers."""
    wait_p95: float
    loads: int
    """Number of model loads that were requested during the run."""
    preemptions: int
    jain: float
    """Fairness among API keys, from above 0 to 1, as `compute_jain_index` returns it."""
    seconds: float
    """Virtual time in seconds at which the last request ended; 0 if any request is still open."""
    ratio_p50: float = math.nan
    """`ttft_p50` divided by the `ttft_p50` of the clairvoyant router; NaN before the comparison."""
    ratio_p95: float = math.nan
    ratio_p99: float = math.nan


def compute_statistics(policy: str, pool: SimulatedPool, until: float) -> RunStatistics:
    """Return the statistics of a completed run. The ratios to the clairvoyant router are NaN.

    Requests that fit on no node are only counted. The times of other requests without a complete answer are infinite.
    `until` is the end of the arrivals in virtual seconds; later tokens do not count for fairness.
    """
    outcomes = [outcome for outcome in pool.outcomes.values() if outcome.fits]
    ttft = sorted(
        math.inf if outcome.first is None or not outcome.served else outcome.first - outcome.arrived
        for outcome in outcomes
    )
    durations = sorted(
        outcome.ended - outcome.arrived if outcome.served and outcome.ended is not None else math.inf
        for outcome in outcomes
    )
    wait = sorted(outcome.sent - outcome.arrived for outcome in outcomes if outcome.served and outcome.sent is not None)
    sent = [outcome for outcome in outcomes if outcome.tries]
    return RunStatistics(
        policy,
        len(pool.outcomes),
        len(outcomes),
        sum(outcome.served for outcome in outcomes),
        compute_quantile(ttft, 0.5),
        compute_quantile(ttft, 0.95),
        compute_quantile(ttft, 0.99),
        sum(isinstance(outcome.outcome, Refused) for outcome in outcomes),
        sum(outcome.first_refused for outcome in sent) / max(1, len(sent)),
        sum(isinstance(outcome.outcome, RequestFailure) for outcome in outcomes),
        compute_quantile(durations, 0.5),
        compute_quantile(durations, 0.95),
        compute_quantile(wait, 0.5),
        compute_quantile(wait, 0.95),
        pool.loads,
        pool.preemptions,
        compute_jain_index(outcomes, until, pool.scenario.queue_timeout_seconds),
        pool.finished_at,
    )


def compute_quantile(ordered: Sequence[float], part: float) -> float:
    """Return the quantile `part` (0 to 1) of ascending values, by nearest rank; NaN for no values."""
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)] if ordered else math.nan


def compute_jain_index(outcomes: Iterable[RequestOutcome], until: float, timeout_seconds: float) -> float:
    """Return Jain's fairness index over API keys, of the tokens that were served until `until` (virtual seconds).

    Served tokens are those of the prompts and answers of requests with a complete answer. Each key's tokens are divided
    by the key's max-min fair share of all served tokens. An index of 1 means fair. An index of 1/n means that one of n
    keys got all tokens. The index is 1 for a single key, and for a run without served tokens. Requests that arrived in
    the last `timeout_seconds` before `until` do not count, because their result is still open.
    """
    demands: dict[str, float] = {}
    served: dict[str, float] = {}
    for outcome in outcomes:
        if outcome.arrived > until - timeout_seconds:
            continue
        key, tokens = outcome.turn.key, outcome.turn.prompt + outcome.turn.output
        demands[key] = demands.get(key, 0.0) + tokens
        if outcome.served and outcome.ended is not None and outcome.ended <= until:
            served[key] = served.get(key, 0.0) + tokens
    shares = compute_fair_shares(demands, sum(served.values()))
    parts = [served.get(key, 0.0) / share for key, share in shares.items() if share > 0]
    if len(parts) < 2:
        return 1.0
    square = sum(part * part for part in parts)
    return sum(parts) ** 2 / (len(parts) * square) if square else 1.0


def compute_fair_shares(demands: Mapping[str, float], total: float) -> dict[str, float]:
    """Divide `total` into max-min fair shares, by key: no key gets more than in `demands`.

    A key that needs less than an equal share leaves the difference to the keys that need more.
    """
    shares: dict[str, float] = {}
    left = total
    for number, (key, wanted) in enumerate(sorted(demands.items(), key=lambda item: item[1])):
        shares[key] = min(wanted, left / (len(demands) - number))
        left -= shares[key]
    return shares


_COLUMNS = (
    "POLICY",
    "TTFT p50",
    "p95",
    "p99",
    "x p95",
    "E2E p50",
    "p95",
    "REFUSED",
    "1st REFUSED",
    "FAILED",
    "WAIT p95",
    "LOADS",
    "PREEMPTED",
    "JAIN",
)


def render_table(rows: Sequence[RunStatistics]) -> str:
    """Render rows as a text table. Times are in seconds; `x p95` is a multiple of the clairvoyant router's TTFT p95.

    An infinite value is rendered as `never`, NaN as `-`.
    """
    lines = [_COLUMNS, *(_format_cells(row) for row in rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _format_cells(row: RunStatistics) -> tuple[str, ...]:
    return (
        row.policy,
        _format_seconds(row.ttft_p50),
        _format_seconds(row.ttft_p95),
        _format_seconds(row.ttft_p99),
        _format_ratio(row.ratio_p95),
        _format_seconds(row.whole_p50),
        _format_seconds(row.whole_p95),
        str(row.refused),
        f"{row.first_refused * 100:.2f} %",
        str(row.failed),
        _format_seconds(row.wait_p95),
        str(row.loads),
        str(row.preemptions),
        f"{row.jain:.3f}",
    )


def _format_seconds(value: float) -> str:
    return "never" if math.isinf(value) else "-" if math.isnan(value) else f"{value:.2f}"


def _format_ratio(value: float) -> str:
    return "-" if math.isnan(value) else "never" if math.isinf(value) else f"{value:.2f}"
