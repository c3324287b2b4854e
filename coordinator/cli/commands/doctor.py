"""`cluster doctor`: run all checks, print faults with the next step, and write a bundle for a bug report."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from coordinator.client.api_client import ApiSession, session_options
from coordinator.client.errors import CommandError

if TYPE_CHECKING:
    from coordinator.doctor.host_probe import HostProbe
    from coordinator.doctor.runner import CheckResult

COLOURS = {"ok": "green", "warn": "yellow", "fail": "red", "not here": "bright_black"}
"""Colour of each result of a check."""
LOGS = ("coordinator.log", "node.log", "engine.log", "ray.log", "service.log")
"""Logs in STATE/logs whose events are included in the bundle."""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="The same as -o json.")
@click.option("--strict", is_flag=True, help="Exit code 1 when there are warnings.")
@click.option("--all", "everything", is_flag=True, help="Also print the checks that do not apply to this machine.")
@click.option("--bundle", type=click.Path(path_type=Path, dir_okay=False), help="Write a redacted tar.gz for a report.")
@click.option(
    "--seconds", type=click.FloatRange(1, 600), default=4.5, show_default=True, help="Time limit for all checks."
)
@click.option("--list", "only_list", is_flag=True, help="List the checks without running them.")
@session_options
def doctor(
    session: ApiSession,
    as_json: bool,
    strict: bool,
    everything: bool,
    bundle: Path | None,
    seconds: float,
    only_list: bool,
) -> None:
    """Check this machine and its connection to the pool, and print the next step for each fault.

    The command needs no coordinator and changes nothing. Its checks take less than 5 s. On a busy machine, raise the
    limit with --seconds. Every check has a stable id and a result: ok, warn, fail, or `not here` if the check does not
    apply to this machine.

    Exit codes: 0 no check failed, 1 warnings (with --strict), 6 a check failed. Also: 9 the coordinator is not that of
    this node, 10 macOS blocks the local network.

    --bundle writes versions, settings, findings, conditions, node reports and log events. It writes no key, no token,
    no prompt and no answer.
    """
    from coordinator.doctor.finding import compute_exit_code
    from coordinator.doctor.host_probe import HostProbe
    from coordinator.doctor.runner import CHECKS, run_checks

    if only_list:
        listed = {"schema": 1, "checks": [{"id": check.id, "title": check.title} for check in CHECKS]}
        text = "\n".join(f"{check.id:<14} {check.title}" for check in CHECKS)
        click.echo(json.dumps(listed) if as_json or session.json else text)
        return
    here: HostProbe = HostProbe(session, timeout_seconds=seconds)
    results: list[CheckResult] = []
    as_json = as_json or session.json
    for result in run_checks(here):
        results.append(result)
        if not as_json and (everything or result.finding.result != "not here"):
            _print_result(result)
    written = _write_bundle(here, bundle, results) if bundle is not None else None
    code = compute_exit_code(((result.check.id, result.finding) for result in results), strict=strict)
    counts = {result: sum(check_result.finding.result == result for check_result in results) for result in COLOURS}
    if as_json:
        checks = [result.to_row() for result in results]
        click.echo(json.dumps({"schema": 1, "checks": checks, "counts": counts, "exit": code, "bundle": written}))
    else:
        more = "" if everything else " (--all prints them)"
        click.echo(
            f"{counts['fail']} failed, {counts['warn']} warnings, {counts['ok']} ok, {counts['not here']} that "
            f"do not apply here{more}"
        )
    if written and not as_json:
        click.echo(f"the bundle is in {written}: review it before you send it")
    sys.exit(code)


def _print_result(result: "CheckResult") -> None:
    finding = result.finding
    click.echo(
        click.style(f"{finding.result:<8}", fg=COLOURS[finding.result]) + f" {result.check.id:<14} {finding.text}"
    )
    if finding.fix:
        click.echo(f"{'':23} → {finding.fix}")


def _write_bundle(here: "HostProbe", file: Path, results: "list[CheckResult]") -> str:
    import platform
    from importlib.metadata import version

    from coordinator.client.config_inspect import inspect_settings, read_running_settings
    from coordinator.doctor.bundle import redact_settings, write_bundle

    settings: dict[str, Any] = {}
    inspection = here.read_inspection() or {}
    try:
        settings = redact_settings(
            inspect_settings(here.state, here.state / "config.toml", here.environ, (), inspection).rows
        )
    except CommandError as error:
        settings = {"problem": error.message}
    now = read_running_settings(here.session, inspection)
    contents = {
        "findings.json": [result.to_row() for result in results],
        "versions.json": {
            "macpool": version("macpool"),
            "python": platform.python_version(),
            "system": platform.platform(),
            "machine": platform.machine(),
            "hardware": inspection.get("hardware"),
            "device": here.read_device(),
            "coordinator": here.read_version().value,
        },
        "settings.json": settings,
        "running.json": {"who": now.roles, "settings": redact_settings(now.rows)},
        "conditions.json": here.get("/api/v1/conditions").value if here.knows_coordinator else None,
        "nodes.json": here.read_nodes().value if here.knows_coordinator else None,
    }
    try:
        write_bundle(file, contents, [here.state / "logs" / name for name in LOGS], Path.home())
    except OSError as error:
        raise CommandError(1, f"{file} cannot be written: {error.strerror}") from None
    return str(file)
