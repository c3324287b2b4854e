"""`cluster video`, the whole group; `calibrate` measures on this pool what videos take."""

from typing import Any

import click

from coordinator.cli.session import Session, options, table
from coordinator.cli.video_install import install
from coordinator.cli.videos import calibration, known_models, measured_sizes, only_model, video
from wire.units import show_size

MATRIX = "384x224,640x368,832x480,1280x720"


video.add_command(install)


@video.command()
@click.option("--model", help="Which model; may be left out where the pool has only one for videos.")
@click.option("--sizes", default=MATRIX, show_default=True, help="Sizes to measure.")
@click.option("--steps", type=click.IntRange(1), default=2, show_default=True, help="Denoising steps of each clip.")
@click.option("--frames", type=click.IntRange(1), default=17, show_default=True, help="Frames of each clip.")
@options
def calibrate(session: Session, model: str | None, sizes: str, steps: int, frames: int) -> None:
    """Make a clip of each size and record its peak memory.

    A peak above the prediction moves the prediction up, for this model, engine and quantization. Runs as long as the
    clips take, and waits for its turn behind other videos.
    """
    matrix = measured_sizes(sizes)
    rows = calibration(session, only_model(session, model), matrix, steps, frames)
    profiles = known_models(session)["profiles"]
    session.show({"schema": 1, "clips": rows, "profiles": profiles}, _print)


def _print(answer: dict[str, Any]) -> None:
    table(
        ("SIZE", "STATE", "PEAK", "SECONDS", "ERROR"),
        [
            (one["size"], one["status"], show_size(one["peak"]), str(one["seconds"] or "-"), one["error"][:80])
            for one in answer["clips"]
        ],
        alarming=("failed",),
    )
    for one in answer["profiles"]:
        click.echo(
            f"{one['package']}, engine {one['engine']}, {one['bits'] or 16} bits: base {show_size(one['base'])}, "
            f"{show_size(one['slope'])} a token, margin {show_size(one['margin'])}; {one['measured']} jobs measured"
        )
