"""What is kept: prefixes of prompts, models, and room for video jobs."""

from dashboards.panels import BYTES, COUNT, PER_SECOND, SECONDS, SHARE, Board, figure, lines, quantiles

N = '{node=~"$node"}'


def _rate(name: str) -> str:
    return f"rate(macpool_{name}_total{N}[$__rate_interval])"


def _ends(status: str) -> str:
    return f'sum(increase(macpool_video_jobs_ended_total{{status="{status}"}}[$__range]))'


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
LEASES = (
    lines("Leases", "Taken off each node's cap for video jobs.", BYTES,
          (f"macpool_node_memory_lease_bytes{N}", "{{node}}")),
    lines("Workers beside their leases", "Footprint of each node's video process; it must stay under its lease.", BYTES,
          (f"macpool_video_worker_phys_bytes{N}", "{{node}} worker"),
          (f"macpool_node_memory_lease_bytes{N}", "{{node}} lease")),
    quantiles("Lease confirmed", "From asking a node for memory until its engine lives without it.", SECONDS,
              "macpool_video_lease_confirm_seconds_bucket", over="$__range"),
    lines("Progress", "Of the job that runs on each node.", SHARE,
          (f"macpool_video_job_progress_ratio{N}", "{{node}}")),
)  # fmt: skip
JOBS = (
    figure("Running", "Jobs on a node.", COUNT, 'sum(macpool_video_jobs{state=~"in_progress|finalizing"})'),
    figure("Waiting", "Jobs without memory of a node.", COUNT, 'sum(macpool_video_jobs{state=~"queued|leasing"})'),
    figure("Oldest in line", "How long it waits.", SECONDS, "macpool_video_oldest_queued_seconds"),
    figure("Completed", "In the range shown.", COUNT, _ends("completed")),
    figure("Failed", "In the range shown.", COUNT, _ends("failed"), bad=1),
    figure("Files kept", "On the coordinator.", BYTES, "macpool_video_artifacts_bytes"),
    lines("Jobs", "By state.", COUNT, ("macpool_video_jobs", "{{state}}")),
    lines("Failures", "Failed jobs by reason.", COUNT,
          ("sum by (reason) (increase(macpool_video_failures_total[$__range]))", "{{reason}}")),
    lines("Made", "Seconds of video that are made in a second.", COUNT,
          ("rate(macpool_video_made_seconds_total[$__range])", "made")),
    quantiles("Time to make one", "From a job's lease to its end.", SECONDS,
              "macpool_video_job_duration_seconds_bucket", over="$__range"),
    quantiles("Time in line", "From a job's creation to its lease.", SECONDS,
              "macpool_video_queue_time_seconds_bucket", over="$__range"),
)  # fmt: skip
BOARD = Board(
    "macpool-cache", "Macpool: cache and video", "Prompts that are kept, models that leave, videos and their leases.",
    (("At a glance", GLANCE), ("Prefix cache", PREFIXES), ("Video: jobs", JOBS), ("Video: leases", LEASES)),
    (("node", "Node", "label_values(macpool_gate_armed, node)"),),
)  # fmt: skip
