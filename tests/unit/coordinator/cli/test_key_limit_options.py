"""Options for the limits of a key."""

from typing import Any

import click
import pytest
from click.testing import CliRunner

from coordinator.cli.key_limit_options import CLEARABLE, limit_options, select_limits


@pytest.mark.parametrize(
    ("arguments", "limits"),
    [
        ((), {}),
        (("--model", "a", "--model", "b*", "--label", "lab"), {"models": ("a", "b*"), "labels": ("lab",)}),
        (
            ("--requests-per-minute", "1", "--tokens-per-minute", "2"),
            {"requests_per_minute": 1, "tokens_per_minute": 2},
        ),
        (("--concurrency", "1", "--waiting", "0"), {"concurrency": 1, "waiting": 0}),
        (("--priority", "low", "--no-upstream"), {"priority": "low", "upstreams": False}),
        (("--upstream",), {"upstreams": True}),
    ],
)
def test_only_given_limits_are_sent(arguments: tuple[str, ...], limits: dict[str, Any]):
    found: list[dict[str, Any]] = []

    @click.command()
    @limit_options
    def command(**options: Any) -> None:
        assert set(options) == set(CLEARABLE)
        found.append(select_limits(options))

    assert CliRunner().invoke(command, arguments).exit_code == 0
    assert found == [limits]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--requests-per-minute", "0"),
        ("--tokens-per-minute", "0"),
        ("--concurrency", "0"),
        ("--waiting", "-1"),
        ("--priority", "urgent"),
    ],
)
def test_limits_out_of_range_are_refused(arguments: tuple[str, ...]):
    command = click.command()(limit_options(lambda **_: None))
    assert CliRunner().invoke(command, arguments).exit_code == 2
