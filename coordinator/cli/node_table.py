"""Nodes as rows of a table, with seven columns for 80 characters or all columns, and as bars of the live view.

A node is an object of `/api/v1/nodes`.
"""

from typing import Any

from coordinator.cli.commands.models import format_model_label
from coordinator.cli.memory_breakdown import NO_MARGIN, OFF, UNARMED, describe_breaker, format_age, get_guard_state
from wire.node_state import SILENT, NodeState
from wire.units import GIB, MIB, show_size

NARROW = ("NAME", "STATE", "MEMORY", "HEADROOM", "IN FLIGHT", "MODELS", "VIDEO")
"""Columns of the table of nodes, for terminals of 80 characters."""
WIDE = (
    "NAME",
    "STATE",
    "CHIP",
    "CAP",
    "LIMITED BY",
    "PHYS",
    "MARGIN",
    "HEADROOM",
    "GUARD",
    "IN FLIGHT",
    "MODELS",
    "VIDEO",
    "LAST REPORT",
    "VERSION",
)
"""Columns of the table of nodes with `-o wide`."""


def build_narrow_row(node: dict[str, Any]) -> tuple[str, ...]:
    """Return a node's cells for the columns `NARROW`. MEMORY is current of ceiling, MODELS is loaded of known.

    VIDEO is the last column, because the caller omits it if no node has a video package.
    """
    video = describe_video(node.get("video")).partition(",")[0]
    return (
        node["name"],
        format_state(node),
        format_memory(node),
        format_headroom(node),
        str(node["in_flight"]),
        format_model_count(node),
        video,
    )


def build_wide_row(node: dict[str, Any]) -> tuple[str, ...]:
    """Return a node's cells for the columns `WIDE`."""
    cap, phys, margin = (show_size(node[name] or None) for name in ("cap", "phys", "margin"))
    models = ", ".join(format_model_label(model["name"], model) for model in node["models"]) or "-"
    return (
        node["name"],
        format_state(node),
        node["chip"],
        cap,
        node["cap_bound_by"] or "-",
        phys,
        margin,
        format_headroom(node),
        get_guard_state(node),
        str(node["in_flight"]),
        models,
        describe_video(node.get("video")),
        format_age(node["heard_seconds"]),
        node["version"],
    )


def format_state(node: dict[str, Any]) -> str:
    """Return a node's state, followed by facts that need attention.

    The facts are silence, cordon, a failing engine, and a guard that is not armed. For a ready node whose engine is not
    ready, the state of the engine replaces that of the node.
    """
    words = [node["state"]]
    if node["state"] in (NodeState.LOST, NodeState.SUSPECT) and node["heard_seconds"] is not None:
        words[0] += f" {format_age(node['heard_seconds'])}"
    engine = node["engine"]["state"]
    if node["state"] == NodeState.READY and engine not in ("", "ready"):
        words[0] = engine
    words += ["cordoned"] if node["cordoned"] else []
    words += ["failing"] if describe_breaker(node) else []
    guard = get_guard_state(node)
    if guard in (OFF, NO_MARGIN) or (guard == UNARMED and words == ["ready"]):
        words.append({OFF: "guard OFF", NO_MARGIN: NO_MARGIN, UNARMED: UNARMED}[guard])
    return ", ".join(words)


def format_memory(node: dict[str, Any]) -> str:
    """Return current memory and ceiling of a node, such as `12.3/24.0 GiB`; `-` if unknown or outdated."""
    if node["state"] in SILENT or node["current"] is None or not node["ceiling"]:
        return "-"
    unit = GIB if node["ceiling"] >= GIB else MIB
    return f"{node['current'] / unit:.1f}/{node['ceiling'] / unit:.1f} {'GiB' if unit == GIB else 'MiB'}"


def format_model_count(node: dict[str, Any]) -> str:
    """Return the number of loaded models and of all models of a node, such as `1 of 3`; `-` without models."""
    known = node["models"]
    return f"{sum(model['model'] == 'loaded' for model in known)} of {len(known)}" if known else "-"


def describe_video(video: dict[str, Any] | None) -> str:
    """Describe the field `video` of a node: its leases with phase and progress, or else its state.

    The states are `not allowed`, `ready` and `not ready`; `-` for a node without a video package.
    """
    if not video or not video["packages"]:
        return "-"
    lent = [lease for lease in video["leases"] if lease["size"]]
    if lent:
        return ", ".join(
            f"leases {show_size(record['size'])}, {record['phase']} {record['progress']} %" for record in lent
        )
    if not video["allowed"]:
        return "not allowed"
    return "ready" if video["ready"] and video["ray"] else "not ready"


def format_headroom(node: dict[str, Any]) -> str:
    """Return a node's headroom as text, such as `1.5 GiB`; `-` if it is unknown or outdated."""
    return "-" if node["state"] in SILENT else show_size(node["headroom"])


def render_bar(node: dict[str, Any], columns: int) -> str:
    """Render a node's ceiling as a bar of `columns` characters: current, reserved, margin and free.

    The bar consists of `?` if the numbers are unknown or outdated.
    """
    ceiling = node["ceiling"] or 0
    if not ceiling or node["current"] is None or node["state"] in SILENT:
        return "?" * columns
    drawn = ""
    for letter, size in (("█", node["current"]), ("▒", node["reserved"]), ("░", node["margin"])):
        drawn += letter * round(max(0, size) / ceiling * columns)
    return drawn[:columns].ljust(columns, "·")
