"""Dashboard "video": video jobs, their memory leases, and their durations."""

from dashboards.panels import BYTES, COUNT, SECONDS, SHARE, Board, figure, lines, quantiles

N = '{node=~"$node"}'


def _ends(status: str) -> str:
    return f'sum(increase(macpool_video_jobs_ended_total{{status="{status}"}}[$__range]))'


JOBS = (
    figure("Running", "Jobs that run on a node.", COUNT, 'sum(macpool_video_jobs{state=~"in_progress|finalizing"})'),
    figure(
        "Queued",
        "Jobs that wait for a Mac with enough memory.",
        COUNT,
        'sum(macpool_video_jobs{state=~"queued|leasing"})',
    ),
    figure("Oldest queued", "Waiting time of the oldest queued job.", SECONDS, "macpool_video_oldest_queued_seconds"),
    figure("Completed", "In the selected time range.", COUNT, _ends("completed")),
    figure("Failed", "In the selected time range.", COUNT, _ends("failed"), bad=1),
    figure("Stored files", "Size of the video files on the coordinator.", BYTES, "macpool_video_artifacts_bytes"),
    lines("Jobs", "Jobs by state.", COUNT, ("macpool_video_jobs", "{{state}}")),
    quantiles(
        "Time to complete",
        "From a job's lease to its end.",
        SECONDS,
        "macpool_video_job_duration_seconds_bucket",
        over="$__range",
    ),
    quantiles(
        "Time queued",
        "From a job's creation to its lease.",
        SECONDS,
        "macpool_video_queue_time_seconds_bucket",
        over="$__range",
    ),
    lines(
        "Leases",
        "Memory that each node's cap is lowered by for video jobs.",
        BYTES,
        (f"macpool_node_memory_lease_bytes{N}", "{{node}}"),
    ),
    lines(
        "Workers and their leases",
        "Footprint of each node's video process, which must stay under its lease.",
        BYTES,
        (f"macpool_video_worker_phys_bytes{N}", "{{node}} worker"),
        (f"macpool_node_memory_lease_bytes{N}", "{{node}} lease"),
    ),
    lines(
        "Progress",
        "Progress of the running job of each node.",
        SHARE,
        (f"macpool_video_job_progress_ratio{N}", "{{node}}"),
    ),
)
DETAIL = (
    lines(
        "Failures",
        "Failed jobs by reason.",
        COUNT,
        ("sum by (reason) (increase(macpool_video_failures_total[$__range]))", "{{reason}}"),
    ),
    lines(
        "Output",
        "Seconds of video that are made per second.",
        COUNT,
        ("rate(macpool_video_output_seconds_total[$__range])", "made"),
    ),
    quantiles(
        "Lease confirmed",
        "From the request for memory until the engine confirms its lower ceiling.",
        SECONDS,
        "macpool_video_lease_confirm_seconds_bucket",
        over="$__range",
    ),
)
BOARD = Board(
    "macpool-video",
    "Macpool: video",
    "Video jobs, their waiting times, and their memory leases.",
    (("Video now", JOBS), ("Failures, output and leases", DETAIL)),
    (("node", "Mac", "label_values(macpool_gate_armed, node)"),),
)
