"""Dashboard "video": video jobs, their memory leases, and their durations."""

from dashboards.panels import (
    BYTES,
    COUNT,
    SECONDS,
    SHARE,
    Board,
    create_line_panel,
    create_quantile_panel,
    create_stat_panel,
)

N = '{node=~"$node"}'


def _build_end_count(status: str) -> str:
    return f'sum(increase(macpool_video_jobs_ended_total{{status="{status}"}}[$__range]))'


JOBS = (
    create_stat_panel(
        "Running", "Jobs that run on a node.", COUNT, 'sum(macpool_video_jobs{state=~"in_progress|finalizing"})'
    ),
    create_stat_panel(
        "Queued",
        "Jobs that wait for a Mac with enough memory.",
        COUNT,
        'sum(macpool_video_jobs{state=~"queued|leasing"})',
    ),
    create_stat_panel(
        "Oldest queued", "Waiting time of the oldest queued job.", SECONDS, "macpool_video_oldest_queued_seconds"
    ),
    create_stat_panel("Completed", "In the selected time range.", COUNT, _build_end_count("completed")),
    create_stat_panel("Failed", "In the selected time range.", COUNT, _build_end_count("failed"), bad=1),
    create_stat_panel(
        "Stored files", "Size of the video files on the coordinator.", BYTES, "macpool_video_artifacts_bytes"
    ),
    create_line_panel("Jobs", "Jobs by state.", COUNT, ("macpool_video_jobs", "{{state}}")),
    create_quantile_panel(
        "Time to complete",
        "From a job's lease to its end.",
        SECONDS,
        "macpool_video_job_duration_seconds_bucket",
        window="$__range",
    ),
    create_quantile_panel(
        "Time queued",
        "From a job's creation to its lease.",
        SECONDS,
        "macpool_video_queue_time_seconds_bucket",
        window="$__range",
    ),
    create_line_panel(
        "Leases",
        "Memory that each node's cap is lowered by for video jobs.",
        BYTES,
        (f"macpool_node_memory_lease_bytes{N}", "{{node}}"),
    ),
    create_line_panel(
        "Workers and their leases",
        "Footprint of each node's video process, which must stay under its lease.",
        BYTES,
        (f"macpool_video_worker_phys_bytes{N}", "{{node}} worker"),
        (f"macpool_node_memory_lease_bytes{N}", "{{node}} lease"),
    ),
    create_line_panel(
        "Progress",
        "Progress of the running job of each node.",
        SHARE,
        (f"macpool_video_job_progress_ratio{N}", "{{node}}"),
    ),
)
DETAIL = (
    create_line_panel(
        "Failures",
        "Failed jobs by reason.",
        COUNT,
        ("sum by (reason) (increase(macpool_video_failures_total[$__range]))", "{{reason}}"),
    ),
    create_line_panel(
        "Output",
        "Seconds of video that are made per second.",
        COUNT,
        ("rate(macpool_video_output_seconds_total[$__range])", "made"),
    ),
    create_quantile_panel(
        "Lease confirmed",
        "From the request for memory until the engine confirms its lower ceiling.",
        SECONDS,
        "macpool_video_lease_confirm_seconds_bucket",
        window="$__range",
    ),
)
BOARD = Board(
    "macpool-video",
    "Macpool: video",
    "Video jobs, their waiting times, and their memory leases.",
    (("Video now", JOBS), ("Failures, output and leases", DETAIL)),
    (("node", "Mac", "label_values(macpool_gate_armed, node)"),),
)
