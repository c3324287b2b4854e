"""Alert rules: the source of both the rules for Prometheus and the coordinator's own conditions.

Each rule has an entry with its name in the runbook, docs/alerts.md. A test evaluates a case in which the rule holds and
a case in which it does not, with Prometheus and with the coordinator.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from coordinator.alerts.promql import (
    BinaryOp,
    Comparison,
    CurrentTime,
    Expression,
    Increase,
    Intersection,
    Labels,
    MaxOver,
    Metric,
    walk_expression,
)
from wire.node_state import NodeState

RUNBOOK = "docs/alerts.md#"
"""Path of the runbook, to which the anchor of an entry is appended."""
DEFAULT_PAGE_URL = "http://127.0.0.1:8080"
"""Address of the page of a coordinator with default settings."""


class Severity(StrEnum):
    """Urgency of a condition.

    `CRITICAL`: a Mac or the pool is down or at risk. `WARNING`: the pool works, with reduced capacity.
    """

    CRITICAL = "critical"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class AlertRule:
    """Alert rule: an expression over metrics, the time for which it must hold, and texts for a person."""

    name: str
    severity: Severity
    expression: Expression
    seconds: int
    """Seconds for which the expression must hold before the condition is active; 0 for no delay."""
    summary: str
    """Description of the condition. Label names in braces stand for the values of the labels."""
    remedy: str
    """Next step for a person, as text."""

    @property
    def runbook(self) -> str:
        """Path and anchor of the rule's entry in the runbook, relative to the repository."""
        return RUNBOOK + self.name.lower()

    def list_metrics(self) -> set[str]:
        """Return the full names of the metrics in the rule's expression."""
        return {part.name for part in walk_expression(self.expression) if isinstance(part, Metric | Increase)}


def format_summary(text: str, labels: Labels) -> str:
    """Replace each label name in braces in a summary by the value of that label. Unknown names are kept."""
    for label, value in labels:
        text = text.replace("{" + label + "}", value)
    return text


def _build_metric(name: str, **only: str) -> Metric:
    return Metric("macpool_" + name, tuple(only.items()))


def _build_increase(name: str, seconds: int, *without: str) -> Increase:
    return Increase(f"macpool_{name}_total", seconds, without)


def _build_remaining_share(expires: str, issued: str) -> Expression:
    """Return the expression for the remaining share (0 to 1) of a certificate's validity.

    `expires` and `issued` are metrics with the Unix seconds of these times, named without the prefix `macpool_`.
    """
    return BinaryOp(
        BinaryOp(_build_metric(expires), "-", CurrentTime()),
        "/",
        BinaryOp(_build_metric(expires), "-", _build_metric(issued)),
    )


_CRITICAL, _WARNING = Severity.CRITICAL, Severity.WARNING

RULES = (
    AlertRule(
        "GateInert",
        _CRITICAL,
        Intersection(
            Comparison(_build_increase("engine_forwards", 30), ">", 0),
            Comparison(_build_increase("gate_checks", 30, "site"), "==", 0),
        ),
        5,
        "{node} runs forward passes without a check by its gate: its cap is not enforced",
        "cordon the node (`cluster node cordon NAME`), then update or restart it, and report a bug",
    ),
    AlertRule(
        "GateUnarmed",
        _CRITICAL,
        Intersection(
            Comparison(_build_metric("gate_armed"), "==", 0), Comparison(_build_metric("gate_guard"), "==", 1)
        ),
        30,
        "the gate of {node} is not armed: it refuses every request",
        "`cluster node show NAME` shows the cause: missing limits, or an unreadable footprint",
    ),
    AlertRule(
        "GuardOff",
        _CRITICAL,
        Comparison(_build_metric("gate_guard"), "==", 0),
        0,
        "memory.guard is off on {node}: no request is refused for memory, and the machine may panic",
        'set memory.guard = "on" and restart the node',
    ),
    AlertRule(
        "MarginZero",
        _WARNING,
        Intersection(
            Comparison(_build_metric("node_memory_margin_bytes"), "==", 0),
            Comparison(_build_metric("node_memory_cap_bytes"), ">", 0),
        ),
        10,
        "memory.margin is 0 on {node}: a memory spike between two readings can end the engine",
        'set memory.margin = "auto" and restart the node',
    ),
    AlertRule(
        "OverCap",
        _CRITICAL,
        Comparison(
            _build_metric("node_memory_engine_phys_bytes"),
            ">",
            BinaryOp(_build_metric("node_memory_cap_bytes"), "-", _build_metric("node_memory_lease_bytes")),
        ),
        10,
        "the engine of {node} is over its cap, and the enforcer has not brought it below",
        "unload a model there (`cluster model unload MODEL --node NAME`); other code there may use memory",
    ),
    AlertRule(
        "StaleSensor",
        _CRITICAL,
        Comparison(BinaryOp(CurrentTime(), "-", _build_metric("node_memory_reading_timestamp_seconds")), ">", 20),
        10,
        "the agent of {node} has not read its memory for 20 s",
        "the machine hangs or sleeps: check it and its log (`cluster logs NAME`)",
    ),
    AlertRule(
        "NodeDown",
        _CRITICAL,
        Comparison(_build_metric("cluster_node_state", state=NodeState.LOST), "==", 1),
        60,
        "{node} is lost",
        "check its power and network, then its own log; if the machine is gone, run `cluster node remove NAME`",
    ),
    AlertRule(
        "CutOff",
        _CRITICAL,
        Comparison(_build_metric("coordinator_self_suspect"), "==", 1),
        5,
        "half of the nodes stopped reporting at once",
        "check the coordinator's own network first",
    ),
    AlertRule(
        "StateUnwritten",
        _CRITICAL,
        Comparison(_build_metric("coordinator_unwritten_changes"), ">", 0),
        10,
        "the coordinator's disk does not take its state: keys, members and usage are only in memory",
        "make room on the disk of its state folder: the changes are then written within seconds",
    ),
    AlertRule(
        "ModelConflict",
        _WARNING,
        Comparison(_build_metric("cluster_model_fingerprints"), ">", 1),
        60,
        "nodes have different models with the name {model}: requests go to one of them only",
        "`cluster models` shows which node has which: download the model again where it differs, or rename its "
        "folder there",
    ),
    AlertRule(
        "ModelWishUnmet",
        _WARNING,
        Comparison(_build_metric("wish_replicas_ready"), "<", _build_metric("wish_replicas_wanted")),
        600,
        "the wish for {model} has been unmet for 10 minutes",
        "`cluster model plan` shows the missing number",
    ),
    AlertRule(
        "BreakerOpen",
        _WARNING,
        Comparison(_build_metric("router_breaker_open"), "==", 1),
        30,
        "the engine of {node} keeps failing: the node gets no requests",
        "`cluster logs NAME` shows why it ended",
    ),
    AlertRule(
        "EngineCrashing",
        _WARNING,
        Comparison(_build_increase("engine_restarts", 600), ">", 2),
        0,
        "the engine of {node} restarted more than twice in 10 minutes",
        "`cluster logs NAME` shows why it ended",
    ),
    AlertRule(
        "EngineKilled",
        _WARNING,
        Comparison(_build_increase("node_memory_kills", 600), ">", 0),
        0,
        "the engine of {node} was killed because it stayed over its cap",
        "choose a safer memory.tier or a larger memory.margin there",
    ),
    AlertRule(
        "WiredLeak",
        _CRITICAL,
        Comparison(_build_metric("engine_leaked_wired_bytes"), ">", 0),
        0,
        "engines of {node} that ended left wired memory behind",
        "restart this Mac: only a restart frees the memory; after a second leak no engine is started there",
    ),
    AlertRule(
        "LeaseLeak",
        _WARNING,
        Intersection(
            Comparison(_build_metric("node_memory_lease_bytes"), ">", 0),
            Comparison(_build_metric("video_worker_phys_bytes"), "==", 0),
        ),
        600,
        "{node} has held a lease for 10 minutes without a video process",
        "restart the node: its leases end with it",
    ),
    AlertRule(
        "ReservationLeak",
        _CRITICAL,
        Comparison(_build_metric("router_reservation_leaks"), ">", 0),
        15,
        "the router holds reservations of requests that have ended: nodes look fuller than they are",
        "restart the coordinator, and report a bug with its log",
    ),
    AlertRule(
        "IllegalEvent",
        _WARNING,
        Comparison(_build_increase("illegal_events", 600), ">", 0),
        0,
        "the {machine} state machine got an event that it does not allow, and kept its state",
        "`cluster logs` has the error with the state and the event: report a bug with it",
    ),
    AlertRule(
        "NodeIllegalEvent",
        _WARNING,
        Comparison(_build_increase("node_illegal_events", 600), ">", 0),
        0,
        "the agent of {node} refused an event that a state machine does not allow, and kept its state",
        '`cluster logs NAME` has the event and the state under "illegal event": report a bug with it',
    ),
    AlertRule(
        "QueueStuck",
        _CRITICAL,
        Intersection(
            Comparison(_build_metric("router_queue_depth"), ">", 0),
            Comparison(_build_increase("router_attempts", 60), "==", 0),
        ),
        30,
        "requests are queued, and for 60 s none was sent to a node",
        "`cluster place MODEL` shows the refusal of each node; unload a model or add a Mac",
    ),
    AlertRule(
        "NoHeadroomAnywhere",
        _WARNING,
        Comparison(MaxOver(_build_metric("cluster_node_headroom_bytes")), "<=", 0),
        60,
        "no node has headroom",
        "unload idle models, close programs on the Macs, or add a Mac",
    ),
    AlertRule(
        "HighRefusalRatio",
        _WARNING,
        Intersection(
            Comparison(_build_increase("gate_refusals", 300, "reason"), ">", 10),
            Comparison(
                BinaryOp(
                    _build_increase("gate_refusals", 300, "reason"), "/", _build_increase("gate_checks", 300, "site")
                ),
                ">",
                0.5,
            ),
        ),
        60,
        "the gate of {node} refuses more than half of the requests that it checks",
        "`cluster node show NAME` shows its memory; unload a model, or raise its cap",
    ),
    AlertRule(
        "CertExpiry",
        _CRITICAL,
        Comparison(_build_remaining_share("tls_expires_timestamp_seconds", "tls_issued_timestamp_seconds"), "<", 0.2),
        0,
        "the certificate of the {certificate} has less than a fifth of its validity left and was not renewed",
        "check the coordinator's log and the clock of its machine; if the certificate is your own, replace it",
    ),
    AlertRule(
        "NodeCertExpiry",
        _CRITICAL,
        Comparison(
            _build_remaining_share(
                "cluster_node_certificate_expires_timestamp_seconds",
                "cluster_node_certificate_issued_timestamp_seconds",
            ),
            "<",
            0.2,
        ),
        0,
        "the certificate of {node} has less than a fifth of its validity left and was not renewed",
        "restart the node; if that does not help, check its clock and join it again",
    ),
    AlertRule(
        "FilesRunOut",
        _WARNING,
        Comparison(BinaryOp(_build_metric("process_open_fds"), "/", _build_metric("process_max_fds")), ">", 0.9),
        30,
        "the coordinator uses more than 90 % of the files and connections that it may open",
        "check which clients are connected; raise the coordinator's limit of open files",
    ),
    AlertRule(
        "CoordinatorDown",
        _CRITICAL,
        Comparison(Metric("up", (("job", "macpool"),)), "==", 0),
        30,
        "Prometheus cannot scrape the coordinator",
        "check that it runs, that its address is right, and that the token is valid (`cluster key list`)",
    ),
)
"""All alert rules."""
EXTERNAL_RULES = frozenset({"CoordinatorDown"})
"""Names of the rules that only an external observer can evaluate, because they concern the coordinator itself."""
WATCHED = tuple(rule for rule in RULES if rule.name not in EXTERNAL_RULES)
"""Rules that the coordinator evaluates as conditions."""


def collect_windows() -> Mapping[str, frozenset[float]]:
    """Return the windows, in seconds, over which rules use the increase of each counter, by its full name."""
    windows: dict[str, set[float]] = {}
    for rule in WATCHED:
        for part in walk_expression(rule.expression):
            if isinstance(part, Increase):
                windows.setdefault(part.name, set()).add(part.seconds)
    return {name: frozenset(seconds) for name, seconds in windows.items()}


def build_runbook_url(base: str, name: str) -> str:
    """Return the URL of a rule's runbook entry. `base` is the URL of the page without a path."""
    return f"{base}/#/runbook/{name}"


def render_rules_file(base: str = DEFAULT_PAGE_URL) -> str:
    """Render the rules as a rules file (YAML) for Prometheus. `base` is the URL of the page without a path."""
    lines = [
        "# Written by `make docs` from coordinator/alerts/rules.py. Do not edit.",
        "groups:",
        "  - name: macpool",
        "    rules:",
    ]
    for rule in RULES:
        lines += [f"      - alert: {rule.name}", f"        expr: {_quote(rule.expression.to_promql())}"]
        lines += [f"        for: {rule.seconds}s"] if rule.seconds else []
        lines += [f"        labels: {{severity: {rule.severity}}}", "        annotations:"]
        lines += [f"          summary: {_quote(_to_template(rule.summary))}"]
        lines += [
            f"          description: {_quote(rule.remedy)}",
            f"          runbook_url: {_quote(build_runbook_url(base, rule.name))}",
        ]
    return "\n".join(lines) + "\n"


def _to_template(summary: str) -> str:
    return summary.replace("{", "{{ $labels.").replace("}", " }}")


def _quote(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"
