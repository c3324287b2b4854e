"""Options of commands for the limits of an API key."""

from collections.abc import Callable
from typing import Any

import click

CLEARABLE = (
    "models",
    "labels",
    "requests_per_minute",
    "tokens_per_minute",
    "concurrency",
    "waiting",
    "priority",
    "upstreams",
)
"""Limits of a key that a command can remove."""


def limit_options(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command with the options for a key's limits. Each name in `CLEARABLE` becomes a keyword argument."""
    for option in reversed(
        (
            click.option(
                "--model", "models", multiple=True, help="Allow only this model or pattern (`qwen*`); may be repeated."
            ),
            click.option("--label", "labels", multiple=True, help="Use only nodes with this label; may be repeated."),
            click.option("--requests-per-minute", type=click.IntRange(1), help="Maximum requests per minute."),
            click.option(
                "--tokens-per-minute", type=click.IntRange(1), help="Maximum tokens per minute, including prompts."
            ),
            click.option(
                "--concurrency",
                type=click.IntRange(1),
                help="Maximum open requests, including queued ones. Also the maximum of open videos.",
            ),
            click.option(
                "--waiting",
                type=click.IntRange(0),
                help="Maximum queued requests; default: a quarter of the queue, more while no other key waits. "
                "Also the maximum of queued videos; default: no limit for a key.",
            ),
            click.option(
                "--priority",
                type=click.Choice(["low", "normal", "high"]),
                help="Weight of the key for queue and decode slots: 1, 4 (normal) or 16.",
            ),
            click.option(
                "--upstream/--no-upstream",
                "upstreams",
                default=None,
                help="Whether prompts may go to upstreams; default: only of keys without --model and --label.",
            ),
        )
    ):
        command = option(command)
    return command


def select_limits(options: dict[str, Any]) -> dict[str, Any]:
    """Return the limits that the user gave by the options of `limit_options`, in the form of the API.

    Options that were not given are omitted.
    """
    return {name: value for name, value in options.items() if value not in (None, ())}
