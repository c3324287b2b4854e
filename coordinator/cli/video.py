"""`cluster video`: what has to be there before a machine makes videos."""

import click

from coordinator.cli.video_install import install


@click.group()
def video() -> None:
    """Prepare a pool for videos."""


video.add_command(install)
