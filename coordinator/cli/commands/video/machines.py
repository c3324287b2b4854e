"""`cluster video install` and `calibrate`, added to the group of `coordinator.cli.commands.video.videos`."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import click

from coordinator.cli.commands.video.videos import fetch_video_models, measure_sizes, parse_sizes, select_model, video
from coordinator.cli.spinner import show_spinner
from coordinator.client.api_client import ApiSession, get_default_state, print_table, session_options
from coordinator.client.errors import CommandError
from host.private_files import resolve_home
from host.settings_loader import from_environment, from_tree
from wire.units import show_size

SETTING = "worker.environments"
"""Name of the setting with the folder of video environments."""
MATRIX = "384x224,640x368,832x480,1280x720"
"""Default sizes of `calibrate`, in pixels."""


@video.command()
@click.option("--model", help="Model; optional if the pool has only one for videos.")
@click.option("--sizes", default=MATRIX, show_default=True, help="Sizes to measure.")
@click.option("--steps", type=click.IntRange(1), default=2, show_default=True, help="Denoising steps of each clip.")
@click.option("--frames", type=click.IntRange(1), default=17, show_default=True, help="Frames of each clip.")
@session_options
def calibrate(session: ApiSession, model: str | None, sizes: str, steps: int, frames: int) -> None:
    """Make a clip of each size and record its peak memory.

    If a peak is above the prediction, the prediction for this model, engine and quantization is raised. The command
    waits in the queue behind other videos, and runs until all clips are made. The clips are deleted.
    """
    matrix = parse_sizes(sizes)
    rows = measure_sizes(session, select_model(session, model), matrix, steps, frames)
    profiles = fetch_video_models(session)["profiles"]
    session.print_answer({"schema": 1, "clips": rows, "profiles": profiles}, _print_calibration)


def _print_calibration(answer: dict[str, Any]) -> None:
    print_table(
        ("SIZE", "STATE", "PEAK", "SECONDS", "ERROR"),
        [
            (clip["size"], clip["status"], show_size(clip["peak"]), str(clip["seconds"] or "-"), clip["error"][:80])
            for clip in answer["clips"]
        ],
        alarming=("failed",),
    )
    for profile in answer["profiles"]:
        click.echo(
            f"{profile['package']}, engine {profile['engine']}, {profile['bits'] or 16} bits: "
            f"base {show_size(profile['base'])}, {show_size(profile['slope'])} per token, "
            f"margin {show_size(profile['margin'])}; {profile['measured']} jobs measured"
        )


@video.command()
@click.option("--state", envvar="MACPOOL_STATE", type=click.Path(path_type=Path), help="State folder of the node.")
@click.option(
    "--wheelhouse",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Install all packages from this folder, without an index.",
)
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", help="Output format.")
def install(state: Path | None, wheelhouse: Path | None, output: str) -> None:
    """Install the video environment on this machine.

    The environment takes several GB, and its packages are locked by hash.

    A node that runs here offers video within 30 s, if it has a video package. If the environment is already installed,
    the command changes nothing.
    """
    command = [
        sys.executable,
        "-P",
        "-m",
        "node.video.environment",
        "--folder",
        str(_find_environments_folder(state or get_default_state())),
    ]
    command += ["--wheelhouse", str(wheelhouse)] if wheelhouse else []
    with show_spinner("installing the video environment"):
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CommandError(
            1, done.stderr.strip().removeprefix("error: ") or f"the installation ended with exit code {done.returncode}"
        )
    result = json.loads(done.stdout)
    click.echo(json.dumps(result) if output == "json" else f"the video engine {result['engine']} is installed")


def _find_environments_folder(state: Path) -> Path:
    """Return the folder of video environments of a state folder's node. Raise `CommandError` for an invalid file."""
    file = state / "config.toml"
    try:
        file_settings = from_tree(tomllib.loads(file.read_text())) if file.exists() else {}
    except (OSError, ValueError) as error:
        raise CommandError(2, f"{file}: {error}") from None
    wanted = from_environment(os.environ).get(SETTING, file_settings.get(SETTING))
    return resolve_home(str(wanted)) if wanted else state / "node" / "video" / "environments"
