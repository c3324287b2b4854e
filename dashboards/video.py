"""Video: jobs, their leases of memory, and how long they take."""

from dashboards.panels import BYTES, COUNT, SECONDS, SHARE, Board, figure, lines, quantiles

N = '{node=~"$node"}'


def _ends(status: str) -> str:
    return f'sum(increase(macpool_video_jobs_ended_total{{status="{status}"}}[$__range]))'


JOBS = (
    figure("Running", "Jobs on a node.", COUNT, 'sum(macpool_video_jobs{state=~"in_progress|finalizing"})'),
    figure(
        "Queued", "Jobs that wait for the memory of a Mac.", COUNT, 'sum(macpool_video_jobs{state=~"queued|leasing"})'
    ),
    figure("Oldest queued", "For how long it waits.", SECONDS, "macpool_video_oldest_queued_seconds"),
    figure("Completed", "In the range shown.", COUNT, _ends("completed")),
    figure("Failed", "In the range shown.", COUNT, _ends("failed"), bad=1),
    figure("Files kept", "On the coordinator.", BYTES, "macpool_video_artifacts_bytes"),
    lines("Jobs", "By state.", COUNT, ("macpool_video_jobs", "{{state}}")),
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
        "Taken off each node's cap for video jobs.",
        BYTES,
        (f"macpool_node_memory_lease_bytes{N}", "{{node}}"),
    ),
    lines(
        "Workers beside their leases",
        "Footprint of each node's video process; it must stay under its lease.",
        BYTES,
        (f"macpool_video_worker_phys_bytes{N}", "{{node}} worker"),
        (f"macpool_node_memory_lease_bytes{N}", "{{node}} lease"),
    ),
    lines(
        "Progress", "Of the job that runs on each node.", SHARE, (f"macpool_video_job_progress_ratio{N}", "{{node}}")
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
        "Made",
        "Seconds of video that are made in a second.",
        COUNT,
        ("rate(macpool_video_output_seconds_total[$__range])", "made"),
    ),
    quantiles(
        "Lease confirmed",
        "From asking a node for memory until its engine lives without it.",
        SECONDS,
        "macpool_video_lease_confirm_seconds_bucket",
        over="$__range",
    ),
)
BOARD = Board(
    "macpool-video",
    "Macpool: video",
    "Video jobs, what they wait for, and the memory that is leased to them.",
    (("Video now", JOBS), ("Failures, output and leases", DETAIL)),
    (("node", "Mac", "label_values(macpool_gate_armed, node)"),),
)
