"""Memory of a node as text for the terminal, from its object in the API (`/api/v1/nodes`)."""

import time
from typing import Any

from wire.units import show_count, show_size

OFF, NO_MARGIN, UNARMED = "OFF", "no margin", "not armed"
"""Guard states, in order: guard switched off, margin of 0 bytes, gate not armed."""
ALARMING = frozenset({OFF, NO_MARGIN})
"""Guard states that need attention."""


def format_age(seconds: float | None) -> str:
    """Format an age in seconds in its largest unit, such as `5m`; `-` for None, `0s` for a time in the future."""
    if seconds is None:
        return "-"
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{max(0.0, seconds):.0f}s"


def get_guard_state(node: dict[str, Any]) -> str:
    """Return the guard state of a node: armed, not armed, no margin or OFF; `-` if the cap is unknown."""
    if not node["cap"]:
        return "-"
    if not node["guard"]:
        return OFF
    if not node["margin"]:
        return NO_MARGIN
    return "armed" if node["gate_armed"] else UNARMED


def describe_breaker(node: dict[str, Any], now: float | None = None) -> str:
    """Describe the circuit breaker of a node, with the last failure; return an empty text if the breaker is closed.

    A node without the field `breaker` counts as closed. `now` is in Unix seconds; None means the current time.
    """
    breaker: dict[str, Any] = node.get("breaker", {"state": "closed"})
    if breaker["state"] == "closed":
        return ""
    left = max(0, breaker["until"] - (time.time() if now is None else now))
    then = {"open": f"for {left:.0f} s, then one request is tried", "probing": "except the one that is being tried"}
    outcome = then.get(breaker["state"], "except the next, which is tried")
    return f"its engine keeps failing: the node gets no requests {outcome}; last failure: {breaker['why'] or 'unknown'}"


def render_breakdown(node: dict[str, Any]) -> list[str]:
    """Return the lines about memory in `cluster node show`: cap, ceiling, headroom with its terms, readings, counts."""
    counts, enforcement, system = node["engine"]["counts"], node["enforcement"], node["system_memory"]
    size = {
        name: show_size(node[name])
        for name in (
            "cap",
            "ceiling",
            "leases",
            "margin",
            "phys",
            "active",
            "recent",
            "current",
            "reserved",
            "headroom",
            "base",
            "cache",
            "peak",
            "reserve",
        )
    }
    return [
        f"cap       {size['cap']}, limited by {node['cap_bound_by'] or '-'}, tier {node['tier'] or '-'}",
        f"ceiling   {size['ceiling']}, limited by {node['bound_by'] or '-'}; leases {size['leases']}",
        f"remedy    {node['remedy'] or '-'}",
        f"current   {size['current']} = highest of phys {size['phys']}, active {size['active']}, recent "
        f"{size['recent']}; {node['source'] or 'no source'}, {node['age']:.1f} s old",
        f"headroom  {size['headroom']} = ceiling {size['ceiling']} − margin {size['margin']} − current "
        f"{size['current']} − reserved {size['reserved']}",
        f"guard     {get_guard_state(node)}; level {enforcement['level'].replace('_', ' ')}; "
        f"engine seen by the agent {show_size(enforcement['phys'])}, highest {show_size(enforcement['highest'])}",
        f"mlx       base {size['base']}, free buffers {size['cache']}, peak {size['peak']}; "
        f"last reserve {size['reserve']}; wired {show_size(node['engine']['wired'])}",
        f"system    available {show_size(system['available'])}, pressure {system['pressure'] or 'unknown'}, video "
        f"worker {show_size(system['worker'])}; {system['source'] or 'no source'}, {system['age']:.1f} s old",
        f"counts    {show_count(counts['checks'], 'check')}, {show_count(counts['refusals'], 'refusal')}, "
        f"{show_count(counts['sheds'], 'shed')}, {show_count(counts['evictions'], 'evicted model')}, "
        f"{show_count(enforcement['over_caps'], 'time')} over the cap, "
        f"{show_count(enforcement['kills'], 'engine kill')}, {show_count(node['engine']['restarts'], 'restart')}",
    ]
