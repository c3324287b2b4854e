"""A node as lines of text for `cluster node show`. A node is an object of `/api/v1/nodes`."""

from collections.abc import Sequence
from typing import Any

from coordinator.cli.commands.pause import describe_sharing
from coordinator.cli.commands.tokens_and_keys import format_minute
from coordinator.cli.memory_breakdown import format_age
from wire.units import show_count, show_size

MODEL_COLUMNS = ("MODEL", "STATE", "WEIGHTS", "CONTEXT", "PREFILL", "DECODE", "CACHED")
"""Columns of the table of a node's models. PREFILL and DECODE are in tokens per second."""


def describe_member(node: dict[str, Any]) -> list[str]:
    """Return the lines about a node's membership, machine, requests, engine, disk and video."""
    engine, disk, reason = node["engine"], node["disk"], f": {node['reason']}" if node["reason"] else ""
    return [
        f"name      {node['name']} ({node['id']})",
        f"state     {node['state']}{', cordoned' if node['cordoned'] else ''}{reason}",
        f"report    {format_age(node['heard_seconds'])} old; joined {format_minute(node['joined'])}",
        f"machine   {node['chip']}, {show_size(node['memory'])}, {node['system']}",
        f"macpool   {node['version'] or 'unknown version'}, protocol {node['protocol'] or '-'}",
        f"labels    {', '.join(node['labels']) or '-'}",
        f"sharing   {describe_sharing(node['sharing'])}",
        f"requests  {node['in_flight']} in flight; in its engine {node['running']} running, {node['waiting']} waiting",
        f"engine    {_describe_engine(engine)}",
        f"disk      {show_size(disk['free'])} free of {show_size(disk['total'])}, {disk['folder'] or 'folder unknown'}",
        *_describe_video(node["video"]),
    ]


def _describe_engine(engine: dict[str, Any]) -> str:
    cause = f": {engine['cause']}" if engine["cause"] else ""
    counts = show_count(engine["recycles"], "planned restart")
    leaked = f", {show_size(engine['leaked'])} still wired by ended processes" if engine["leaked"] else ""
    rows = f"at most {show_count(engine['rows'], 'row')} at once"
    return f"{engine['kind'] or 'unknown'}, {engine['state'] or 'unknown'}{cause}; {rows}; {counts}{leaked}"


def _describe_video(video: dict[str, Any]) -> list[str]:
    if not video["packages"]:
        return [f"video     no model: {video['cause']}" if video["cause"] else "video     no model"]
    allowed = "allowed" if video["allowed"] else "not allowed: `cluster node allow-video`"
    cause = video["cause"] or video["ray_cause"]
    ready = "ready" if video["ready"] and video["ray"] else "not ready" + (f": {cause}" if cause else "")
    names = ", ".join(
        package["name"] + (f" ({package['cause']})" if package["cause"] else "") for package in video["packages"]
    )
    lines = [f"video     {allowed}; {ready}; {names}"]
    lines += [
        f"lease     {show_size(lease['size'])}, {lease['phase']} {lease['progress']} %"
        for lease in video["leases"]
        if lease["size"]
    ]
    return lines


def describe_work(engine: dict[str, Any]) -> list[str]:
    """Return the lines about an engine's work and its prefix cache, counted since the start of its process."""
    counts, cache = engine["counts"], engine["cache"]
    return [
        f"work      {show_count(counts['forwards'], 'forward pass', 'forward passes')}, "
        f"{show_count(counts['steps'], 'decode step')}, {show_count(counts['prefill_tokens'], 'prompt token')} "
        f"computed; {show_count(counts['failures'], 'failed request')}",
        f"pressure  {show_count(counts['shrinks'], 'smaller pass', 'smaller passes')}, "
        f"{show_count(counts['preemptions'], 'preemption')}, {counts['recomputed_tokens']} of "
        f"{show_count(counts['returned_tokens'], 'returned token')} computed again, "
        f"{show_count(counts['overs'], 'pass', 'passes')} over the cap; "
        f"{show_count(counts['departures'], 'idle model')} unloaded",
        f"cache     {show_count(cache['entries'], 'prefix', 'prefixes')}, {show_size(cache['nbytes'])}; "
        f"{show_count(cache['hits'], 'hit')} with {show_count(cache['hit_tokens'], 'token')}; {cache['stores']} "
        f"stored, {cache['evictions']} evicted",
        f"on disk   {_describe_disk_cache(cache)}",
    ]


def _describe_disk_cache(cache: dict[str, Any]) -> str:
    if not cache["store"]:
        return "no cache"
    return (
        f"{show_count(cache['disk_files'], 'file')}, {show_size(cache['disk_bytes'])} of "
        f"{show_size(cache['disk_quota'])}; {show_count(cache['disk_hits'], 'hit')} with "
        f"{show_count(cache['disk_hit_tokens'], 'token')}, {show_size(cache['disk_read_bytes'])} read; "
        f"{cache['disk_persisted']} of {show_count(cache['disk_saves'], 'part')} written, {cache['disk_waiting']} "
        f"waiting, {cache['disk_drops']} dropped, {cache['disk_evictions']} evicted, "
        f"{show_count(cache['disk_errors'], 'error')}; {show_size(cache['disk_budget'])} may be written now"
    )


def build_model_rows(node: dict[str, Any]) -> list[Sequence[str]]:
    """Return the cells of a node's models for the columns `MODEL_COLUMNS`, sorted by name."""
    cached = {model["model"]: model["nbytes"] for model in node["engine"]["cache"]["models"]}
    return [
        (
            model["name"],
            _describe_state(model),
            show_size(model["weights"]),
            str(model["context"]),
            f"{model['prefill_speed']:,.0f}",
            f"{model['decode_speed']:,.0f}",
            show_size(cached.get(model["name"], 0)),
        )
        for model in sorted(node["models"], key=lambda model: model["name"])
    ]


def _describe_state(model: dict[str, Any]) -> str:
    match model["model"]:
        case "loading":
            return f"loading {model['progress'] * 100:.0f} %"
        case "failed":
            return f"failed: {model['cause']}"
        case "loaded":
            return "loaded" if model["measured"] else "loaded, not measured"
        case _:
            return "not loaded"
