"""`cluster video`: create, follow, list, fetch and cancel videos, and list the leased memory."""

import re
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import click

from coordinator.cli.commands.tokens_and_keys import Duration, format_minute
from coordinator.cli.group import CommandGroup
from coordinator.client.api_client import RESTART_SECONDS, ApiSession, print_table, session_options
from coordinator.client.errors import NOT_FOUND, REFUSED, TIMED_OUT, CommandError
from coordinator.client.terminal_text import get_raw_stream, replace_control_characters
from wire.units import show_size

POLL_INTERVAL_SECONDS = 1.0
"""Seconds between two queries of a video's state."""
DEFAULT_PROMPT = "a calm sea under a clear sky"
"""Prompt of the clips of `measure_sizes`."""


@click.group(cls=CommandGroup)
def video() -> None:
    """Create, list or fetch videos; prepare machines for them."""


@video.command("list")
@click.option("--last", type=click.IntRange(1, 100), default=20, show_default=True, help="Number of newest videos.")
@session_options
def list_videos(session: ApiSession, last: int) -> None:
    """List the newest videos. Only an administrator's key lists videos of other keys."""
    session.print_answer({"schema": 1, **session.request_json("GET", f"/v1/videos?limit={last}")}, _print_list)


def _print_list(answer: dict[str, Any]) -> None:
    rows = [
        (
            row["id"],
            row["status"],
            f"{row['progress']} %",
            row["model"],
            row["size"],
            f"{row['seconds']} s",
            format_minute(row["created_at"]),
            replace_control_characters(row["error"]["message"] if row["error"] else row["phase"])[:80],
        )
        for row in answer["data"]
    ]
    print_table(("ID", "STATE", "PROGRESS", "MODEL", "SIZE", "LENGTH", "CREATED", "PHASE"), rows, alarming=("failed",))


@video.command()
@click.argument("video")
@session_options
def show(session: ApiSession, video: str) -> None:
    """Show all details of a video."""
    session.print_answer({"schema": 1, **_fetch_video(session, video)}, _print_video)


def _fetch_video(session: ApiSession, video: str) -> dict[str, Any]:
    return session.request_json("GET", _get_path(video))


def _get_path(video: str) -> str:
    return f"/v1/videos/{quote(video, safe='')}"


def _print_video(video: dict[str, Any]) -> None:
    for name, value in video.items():
        if name in ("created_at", "completed_at", "expires_at") and value is not None:
            value = format_minute(value)
        elif name == "peak" and value is not None:
            value = show_size(value)
        if name not in ("object", "schema", "remixed_from_video_id") and value not in (None, []):
            click.echo(f"{name:<16} {replace_control_characters(str(value))}")


@video.command()
@click.argument("prompt", nargs=-1, required=True)
@click.option("--model", help="Model; optional if the pool has only one for videos.")
@click.option("--size", help="WIDTHxHEIGHT in pixels.")
@click.option("--seconds", type=int, help="Length.")
@click.option("--frames", type=int, help="Length in frames instead of seconds.")
@click.option("--fps", type=int, help="Frames per second.")
@click.option("--steps", type=int, help="Denoising steps.")
@click.option("--seed", type=int, help="Seed; the same seed creates the same clip.")
@click.option("--negative-prompt", help="Negative prompt: content to avoid.")
@click.option("--wait", "waits", is_flag=True, help="Wait until the video is complete.")
@click.option(
    "--output-file", type=click.Path(path_type=Path, dir_okay=False), help="Wait, and write the clip into this file."
)
@session_options
def create(session: ApiSession, prompt: tuple[str, ...], waits: bool, output_file: Path | None, **fields: Any) -> None:
    """Create a video from PROMPT, and print its id. The command waits for the end only with --wait or --output-file.

    Exit code: 6 if the command waited for the video and the video failed.
    """
    body = {name: value for name, value in fields.items() if value is not None}
    body["model"] = select_model(session, body.get("model"))
    job = session.request_json("POST", "/v1/videos", {"prompt": " ".join(prompt), **body})
    for warning in job["warnings"]:
        click.secho(warning, fg="yellow", err=True)
    if output_file is not None or waits:
        job = _wait_for_video(session, job["id"], None)
        _raise_if_failed(job)
    if output_file is not None:
        _download(session, job["id"], output_file, "video")
    session.print_answer({"schema": 1, **job}, lambda answer: click.echo(answer["id"]))


@video.command()
@click.argument("video")
@session_options
def cancel(session: ApiSession, video: str) -> None:
    """Cancel a video and free its memory. A video that has ended does not change."""
    answer = session.request_json("POST", f"/v1/videos/{quote(video, safe='')}/cancel")
    session.print_answer({"schema": 1, **answer}, lambda answer: click.echo(f"{answer['id']} {answer['status']}"))


@video.command()
@click.argument("video")
@click.option("--timeout", type=Duration(), help="Maximum wait (30s, 2h).")
@session_options
def wait(session: ApiSession, video: str, timeout: float | None) -> None:
    """Wait until a video is complete, and show its progress.

    Progress is a bar on a terminal, otherwise a line for each phase. `-o json` shows no progress.

    Exit codes: 6 the video failed, 7 timeout.
    """
    job = _wait_for_video(session, video, timeout)
    session.print_answer({"schema": 1, **job}, lambda answer: click.echo(f"{answer['id']} {answer['status']}"))
    _raise_if_failed(job)


@video.command()
@click.argument("video")
@click.option(
    "--output-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Target file; default VIDEO.mp4 or VIDEO.webp.",
)
@click.option("--thumbnail", is_flag=True, help="Write the thumbnail instead.")
@session_options
def get(session: ApiSession, video: str, output_file: Path | None, thumbnail: bool) -> None:
    """Write a complete video into a file. An existing file is replaced once the download is complete."""
    variant = "thumbnail" if thumbnail else "video"
    file = output_file or Path(f"{Path(video).name}.{'webp' if thumbnail else 'mp4'}")
    size = _download(session, video, file, variant)
    session.print_answer(
        {"schema": 1, "id": video, "file": str(file), "bytes": size},
        lambda answer: click.echo(f"{answer['file']}: {show_size(answer['bytes'])}"),
    )


def _download(session: ApiSession, video: str, file: Path, variant: str) -> int:
    """Download the `variant` (`video` or `thumbnail`) of a video into a file, and return its size in bytes.

    The data goes into a temporary file first, which is renamed when it is complete. Raise `CommandError` on failure.
    """
    pieces = session.stream(f"/v1/videos/{quote(video, safe='')}/content?variant={variant}", timeout=300)
    beside, size = file.with_name(file.name + ".part"), 0
    try:
        with beside.open("wb") as target:
            for piece in pieces:
                target.write(piece)
                size += len(piece)
        beside.replace(file)
    except OSError as error:
        raise CommandError(1, f"{file} cannot be written: {error.strerror or error}") from None
    finally:
        beside.unlink(missing_ok=True)
    return size


def _raise_if_failed(job: dict[str, Any]) -> None:
    if job["status"] == "failed":
        raise CommandError(
            REFUSED,
            f"{job['id']} failed: {job['error']['code']}: {replace_control_characters(job['error']['message'])}",
        )


def _wait_for_video(session: ApiSession, video: str, timeout: float | None) -> dict[str, Any]:
    began, last_phase, pause = time.monotonic(), "", threading.Event()
    with _open_progress(session) as bar:
        job = _fetch_video(session, video)
        while job["status"] not in ("completed", "failed"):
            if timeout is not None and time.monotonic() - began >= timeout:
                raise CommandError(
                    TIMED_OUT,
                    f"{video} is {job['status']} ({replace_control_characters(job['phase'])}) after {timeout:.0f} s",
                )
            last_phase = bar.show_progress(job["progress"], replace_control_characters(job["phase"]), last_phase)
            pause.wait(POLL_INTERVAL_SECONDS)
            left = RESTART_SECONDS if timeout is None else timeout - (time.monotonic() - began)
            job = session.poll_json(_get_path(video), min(left, RESTART_SECONDS))
    return job


class ProgressOutput(Protocol):
    """Output of the progress of a video while a command waits for it."""

    def show_progress(self, progress: int, phase: str, last_phase: str) -> str:
        """Show progress (in percent) and phase. Return the phase. `last_phase` is the result of the previous call."""
        ...


class ProgressLines:
    """Progress output as a line for each phase, if standard error is not a terminal."""

    def show_progress(self, progress: int, phase: str, last_phase: str) -> str:
        """Print a line with progress (in percent) and phase if the phase is not `last_phase`. Return the phase."""
        if phase != last_phase:
            click.echo(f"{progress:3d} %  {phase}", err=True)
        return phase


class NoProgress:
    """Progress output for `-o json`, which prints nothing."""

    def show_progress(self, progress: int, phase: str, last_phase: str) -> str:
        """Return the phase, without printing anything."""
        return phase


class ProgressBar:
    """Progress output as a bar on a terminal. `progress` is a started `rich.progress.Progress`."""

    def __init__(self, progress: Any) -> None:
        self._progress = progress
        self._task = progress.add_task("queued", total=100)

    def show_progress(self, progress: int, phase: str, last_phase: str) -> str:
        """Update the bar with progress (in percent) and phase. Return the phase."""
        self._progress.update(self._task, completed=progress, description=phase[:60])
        return phase


@contextmanager
def _open_progress(session: ApiSession) -> Generator[ProgressOutput]:
    if session.json:
        yield NoProgress()
        return
    if not sys.stderr.isatty():
        yield ProgressLines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = BarColumn(), TaskProgressColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=Console(file=get_raw_stream(sys.stderr)), transient=True) as progress:
        yield ProgressBar(progress)


@video.command("leases")
@session_options
def list_leases(session: ApiSession) -> None:
    """List the memory leases of videos. The output includes the memory that the workers use."""
    session.print_answer(session.request_json("GET", "/api/v1/leases"), _print_leases)


def _print_leases(answer: dict[str, Any]) -> None:
    rows = [
        (
            lease["name"],
            show_size(lease["size"]),
            lease["job"],
            lease["phase"],
            f"{lease['progress']} %",
            show_size(lease["footprint"]),
            show_size(lease["peak"]),
            format_minute(lease["since"]),
            "being returned" if lease["orphan"] else "",
        )
        for lease in answer["leases"]
    ]
    print_table(("NODE", "LENT", "VIDEO", "PHASE", "DONE", "FOOTPRINT", "PEAK", "SINCE", ""), rows)


def parse_sizes(text: str) -> list[str]:
    """Return the sizes in a list such as `384x224,832x480`. Raise `click.UsageError` if the text is not such a list."""
    sizes = [size.strip() for size in text.split(",") if size.strip()]
    if not sizes or not all(re.fullmatch(r"\d+x\d+", size, re.ASCII) for size in sizes):
        raise click.UsageError(f"{text!r} is not a list of sizes: write 384x224,832x480")
    return sizes


def measure_sizes(session: ApiSession, model: str, sizes: list[str], steps: int, frames: int) -> list[dict[str, Any]]:
    """Generate one clip of each size, smallest first, and delete it. Return one measurement for each clip.

    A measurement has the size, the status, the peak memory in bytes, the duration in seconds, and the error (empty if
    there is none). A failed clip does not end the measurement. Raise `CommandError` if a request to the coordinator
    fails.
    """
    rows: list[dict[str, Any]] = []
    for size in sorted(sizes, key=_count_pixels):
        click.echo(f"{size}: {frames} frames, {steps} steps", err=True)
        body = {"model": model, "prompt": DEFAULT_PROMPT, "size": size, "frames": frames, "steps": steps, "seed": 1}
        job = _wait_for_video(session, session.request_json("POST", "/v1/videos", body)["id"], None)
        fault = job["error"]["message"] if job["error"] else ""
        rows.append(
            {
                "size": job["size"],
                "status": job["status"],
                "peak": job["peak"],
                "seconds": job["wall_seconds"],
                "error": fault,
            }
        )
        session.request_json("DELETE", f"/v1/videos/{job['id']}")
    return rows


def _count_pixels(size: str) -> int:
    width, _, height = size.partition("x")
    return int(width) * int(height or 0)


def fetch_video_models(session: ApiSession) -> dict[str, Any]:
    """Return the answer of `/api/v1/videos/models`: video models and their memory profiles.

    Raise `CommandError` if no node has a video model, and the errors of `ApiSession.request_json`.
    """
    answer = session.request_json("GET", "/api/v1/videos/models")
    if not answer["models"]:
        raise CommandError(
            NOT_FOUND,
            "no node has a model for videos: add one to a folder of models on a Mac, run "
            "`cluster video install` there, and allow it with `cluster node allow-video NAME`",
        )
    return answer


def select_model(session: ApiSession, model: str | None) -> str:
    """Return `model`, or the only video model of the pool if `model` is None.

    Raise `CommandError` if the pool has no video model, and `click.UsageError` if it has several.
    """
    if model is not None:
        return model
    names = [video_model["name"] for video_model in fetch_video_models(session)["models"]]
    if len(names) > 1:
        raise click.UsageError(f"name a model with --model: {', '.join(names)}")
    return names[0]
