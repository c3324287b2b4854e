"""`cluster video install`: makes the worker's environment on this machine, by the node's own program."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import click

from coordinator.cli.models import waiting
from coordinator.cli.session import Problem, default_state
from wire.settings import from_environment, from_tree

SETTING = "worker.environments"


@click.command()
@click.option("--state", envvar="MACPOOL_STATE", type=click.Path(path_type=Path), help="State folder of the node.")
@click.option("--wheelhouse", type=click.Path(exists=True, file_okay=False, path_type=Path),
              help="Take all packages from this folder and ask no index.")  # fmt: skip
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", help="Output format.")
def install(state: Path | None, wheelhouse: Path | None, output: str) -> None:
    """Make the environment that videos are made in, on this machine: some gigabytes, locked by hash.

    A node that runs here offers video within half a minute, if it has a video package. Nothing is done where the
    environment is there already.
    """
    command = [sys.executable, "-P", "-m", "node.video.environment", "--folder", str(_folder(state or default_state()))]
    command += ["--wheelhouse", str(wheelhouse)] if wheelhouse else []
    with waiting("installing the video environment"):
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Problem(1, done.stderr.strip().removeprefix("error: ") or f"it ended with {done.returncode}")
    made = json.loads(done.stdout)
    click.echo(json.dumps(made) if output == "json" else f"the video engine {made['engine']} is installed")


def _folder(state: Path) -> Path:
    """Say where the node of this state folder keeps environments."""
    file = state / "config.toml"
    try:
        found = from_tree(tomllib.loads(file.read_text())) if file.exists() else {}
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise Problem(2, f"{file}: {error}") from None
    wanted = from_environment(os.environ).get(SETTING, found.get(SETTING))
    return Path(str(wanted)).expanduser() if wanted else state / "node" / "video" / "environments"
