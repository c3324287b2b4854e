"""Metric families of video jobs. A pool without videos has none of their series."""

from collections.abc import Callable, Iterable

from coordinator.metrics.families import (
    MetricFamily,
    MetricKind,
    Row,
    build_single_row,
    to_histogram_value,
)
from coordinator.metrics.pool_readers import NODE_LABEL, read_by_node
from coordinator.metrics.pool_snapshot import PoolSnapshot
from coordinator.video.metrics import ENDS, REASONS, VideoCounters, VideoSnapshot
from wire.histogram import Histogram

_G, _C, _H = MetricKind.GAUGE, MetricKind.COUNTER, MetricKind.HISTOGRAM


def _read_video(read: Callable[[VideoSnapshot], Iterable[Row]]) -> Callable[[PoolSnapshot], Iterable[Row]]:
    """Return a reader that yields no rows for a pool without videos."""
    return lambda picture: read(picture.video) if picture.video.used else ()


def _read_video_times(read: Callable[[VideoCounters], Histogram]) -> Callable[[PoolSnapshot], Iterable[Row]]:
    return _read_video(lambda video: build_single_row(to_histogram_value(read(video.counters))))


_USED = "once a node has a video model, or a job exists or has ended"
VIDEO: tuple[MetricFamily[PoolSnapshot], ...] = (
    MetricFamily(
        "video_jobs",
        _G,
        "Video jobs that have not ended.",
        _read_video(lambda v: [((state,), count) for state, count in v.states.items()]),
        (
            (
                "state",
                "`queued`; `leasing`: a node was asked for memory; `in_progress`; `finalizing`: its files are fetched",
            ),
        ),
        _USED,
    ),
    MetricFamily(
        "video_jobs_ended",
        _C,
        "Ended video jobs.",
        _read_video(lambda v: [((end,), count) for end, count in v.counters.ends.items()]),
        (("status", ", ".join(f"`{end}`" for end in ENDS)),),
        _USED,
    ),
    MetricFamily(
        "video_failures",
        _C,
        "Failed video jobs by reason.",
        _read_video(lambda v: [((reason,), count) for reason, count in v.counters.failures.items()]),
        (("reason", ", ".join(f"`{reason}`" for reason in sorted(REASONS))),),
        "after the first failure with this reason",
    ),
    MetricFamily(
        "video_oldest_queued_seconds",
        _G,
        "Waiting time of the oldest queued job; 0 if the queue is empty.",
        _read_video(lambda v: build_single_row(v.oldest_wait_seconds)),
        when=_USED,
    ),
    MetricFamily(
        "video_job_progress_ratio",
        _G,
        "Progress of the job on a node.",
        read_by_node(lambda p: p.video.progress),
        NODE_LABEL,
        "while a job runs on the node",
    ),
    MetricFamily(
        "video_output_seconds",
        _C,
        "Total length of completed videos.",
        _read_video(lambda v: build_single_row(v.counters.clip_seconds)),
        when=_USED,
    ),
    MetricFamily(
        "video_artifacts_bytes",
        _G,
        "Disk space of video files on the coordinator.",
        _read_video(lambda v: build_single_row(v.stored_bytes)),
        when=_USED,
    ),
    MetricFamily(
        "video_queue_time_seconds",
        _H,
        "From a job's creation to its lease.",
        _read_video_times(lambda counters: counters.queue_seconds),
        when=_USED,
    ),
    MetricFamily(
        "video_job_duration_seconds",
        _H,
        "From a job's lease to its end, for completed jobs.",
        _read_video_times(lambda counters: counters.run_seconds),
        when=_USED,
    ),
    MetricFamily(
        "video_lease_confirm_seconds",
        _H,
        "From the lease request to the node's confirmation.",
        _read_video_times(lambda counters: counters.confirm_seconds),
        when=_USED,
    ),
)
