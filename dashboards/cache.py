"""What is kept: prefixes of prompts, models, and room for video jobs."""

from dashboards.panels import BYTES, COUNT, PER_SECOND, SHARE, Board, figure, lines

N = '{node=~"$node"}'


def _rate(name: str) -> str:
    return f"rate(macpool_{name}_total{N}[$__rate_interval])"


GLANCE = (
    figure("Kept", "By all prefix caches.", BYTES, f"sum(macpool_prefix_cache_bytes{N})"),
    figure("Prompts kept", "In all prefix caches.", COUNT, f"sum(macpool_prefix_cache_entries{N})"),
    figure("Read from a cache", "Share of all prompt tokens that were not read anew.", SHARE,
           "sum(rate(macpool_cached_prompt_tokens_total[$__rate_interval])) / "
           "sum(rate(macpool_prompt_tokens_total[$__rate_interval]))"),
    figure("Leased", "To video jobs, on all nodes.", BYTES, f"sum(macpool_node_memory_lease_bytes{N})"),
)  # fmt: skip
PREFIXES = (
    lines("Size", "What each prefix cache holds; all of it is given back before a request is refused.", BYTES,
          (f"macpool_prefix_cache_bytes{N}", "{{node}} kept"),
          (f"macpool_node_memory_reusable_bytes{N}", "{{node}} reusable")),
    lines("Prompts", "Kept prompts.", COUNT, (f"macpool_prefix_cache_entries{N}", "{{node}}")),
    lines("Hits", "Requests that were served, per second.", PER_SECOND, (_rate("prefix_cache_hits"), "{{node}}")),
    lines("Tokens not read anew", "Per second.", PER_SECOND, (_rate("prefix_cache_hit_tokens"), "{{node}}")),
    lines("Stored and evicted", "Prompts per second.", PER_SECOND,
          (_rate("prefix_cache_stores"), "{{node}} stored"), (_rate("prefix_cache_evictions"), "{{node}} evicted")),
    lines("Models that made room", "Evicted for another, or unused for long.", PER_SECOND,
          (_rate("model_evictions"), "{{node}} evicted"), (_rate("model_departures"), "{{node}} left")),
)  # fmt: skip
VIDEO = (
    lines("Leases", "Taken off each node's cap for video jobs.", BYTES,
          (f"macpool_node_memory_lease_bytes{N}", "{{node}}")),
    lines("Workers beside their leases", "Footprint of each node's video process; it must stay under its lease.", BYTES,
          (f"macpool_video_worker_phys_bytes{N}", "{{node}} worker"),
          (f"macpool_node_memory_lease_bytes{N}", "{{node}} lease")),
)  # fmt: skip
BOARD = Board(
    "macpool-cache", "Macpool: cache and video", "Prompts that are kept, models that leave, leases of video.",
    (("At a glance", GLANCE), ("Prefix cache", PREFIXES), ("Video", VIDEO)),
    (("node", "Node", "label_values(macpool_gate_armed, node)"),),
)  # fmt: skip
