"""`cluster service`: install, check, restart and remove the system service of this machine."""

import json
import os
import pwd
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from coordinator.cli.group import CommandGroup
from coordinator.cli.spinner import show_spinner
from coordinator.client.errors import NOT_FOUND, REFUSED, CommandError

if TYPE_CHECKING:
    from coordinator.service.plan import ServicePlan
    from coordinator.service.service_manager import ServiceHost

INSTALLED_NOT_RUNNING = 1
"""Exit code of `cluster service status` for a service that is installed but does not run."""


@click.group(cls=CommandGroup)
def service() -> None:
    """Run this machine's part of the pool as a system service that starts at boot.

    The service is a LaunchDaemon on macOS and a systemd unit on Linux. Both run as an ordinary user.
    """


@service.command(context_settings={"ignore_unknown_options": False})
@click.option("--user", help="User that runs the service, not root; default: the user who called sudo.")
@click.option(
    "--state", envvar="MACPOOL_STATE", type=click.Path(path_type=Path), help="State folder; default: that of the user."
)
@click.option("--coordinator", is_flag=True, help="Create a cluster here at the first start if there is none.")
@click.option("--wired-limit-mb", type=click.IntRange(1), help="macOS: set Metal's wired limit at each start.")
@click.option("--dry-run", is_flag=True, help="Print the files that would be written; change nothing.")
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", help="Output format.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def install(
    ctx: click.Context,
    user: str | None,
    state: Path | None,
    coordinator: bool,
    wired_limit_mb: int | None,
    dry_run: bool,
    output: str,
    arguments: tuple[str, ...],
) -> None:
    """Install the service, or repair it. Running the command again with the same options changes nothing.

    The service runs `cluster up` if a cluster was created here, and `cluster join` if a node has joined. Join once by
    hand first. ARGUMENTS after `--` are passed to that command, as in `cluster service install -- --lan`.

    Exit codes: 4 not root; 5 the user is unknown, or there is neither a cluster nor a joined node here. Also: 6
    refused; 7 the service does not stay up (the previous state is restored). A refusal means that the service would run
    as root, or that it serves another state folder. It can also mean that files of another program or user are in the
    way.
    """
    from coordinator.service.installer import install as carry_out
    from coordinator.service.service_manager import ServiceHost

    host = ctx.obj if isinstance(ctx.obj, ServiceHost) else ServiceHost()
    plan = _create_plan(host, user, state, coordinator, wired_limit_mb or 0, arguments)
    if dry_run:
        _print_units(host, plan, output)
        return
    with _convert_errors(), show_spinner("installing and starting the service"):
        done, service_state = carry_out(host, plan)
    answer = {
        "schema": 1,
        "done": done,
        "unit": str(host.unit),
        "user": plan.user,
        "state": plan.state,
        "role": plan.role,
        "pid": service_state.pid,
    }
    if output == "json":
        click.echo(json.dumps(answer))
        return
    for step in done or [f"nothing to do: the service runs, process {service_state.pid}"]:
        click.echo(step)
    click.echo(f"it runs as {plan.user} with the state folder {plan.state}; `cluster service status` shows its state")


def _create_plan(
    host: "ServiceHost", user: str | None, state: Path | None, coordinator: bool, wired: int, arguments: tuple[str, ...]
) -> "ServicePlan":
    """Choose user, role and program of the service.

    Raise `CommandError` if the user is unknown, if an argument or wired limit is refused, or if the state folder has
    neither cluster nor node.
    """
    from coordinator.service.plan import ServicePlan, explain_refused_arguments
    from coordinator.service.service_manager import find_account, find_group_name

    name = user or os.environ.get("SUDO_USER") or pwd.getpwuid(os.getuid()).pw_name
    with _convert_errors():
        _, gid, home = find_account(name)
        group = find_group_name(gid)
    folder = (state or Path(home) / _get_data_folder(host)).absolute()
    refused = explain_refused_arguments(arguments)
    if refused is not None:
        raise CommandError(2, refused)
    role = "coordinator" if coordinator or (folder / "cluster.db").exists() else "node"
    if role == "node" and not (folder / "node" / "identity" / "identity.json").exists():
        raise CommandError(
            NOT_FOUND,
            f"{folder} has neither a joined node nor a cluster: join once by hand "
            "(`cluster join URL --token-file FILE`, Ctrl-C), or create a cluster with --coordinator",
        )
    _check_arguments(role, arguments)
    if wired:
        _check_wired_limit(host, folder, wired)
    return ServicePlan(
        role,
        sys.executable,
        name,
        group,
        home,
        str(folder),
        f"/{host.logs.relative_to(host.root)}",
        arguments,
        wired,
    )


def _get_data_folder(host: "ServiceHost") -> str:
    """Return the state folder relative to a home folder: the same path that platformdirs uses for the current user."""
    return "Library/Application Support/macpool" if host.mac else ".local/share/macpool"


def _check_arguments(role: str, arguments: tuple[str, ...]) -> None:
    """Check the arguments with the parser of `up` or `join`, because a service with wrong ones exits at once."""
    from coordinator.cli.commands.join import join
    from coordinator.cli.commands.up import up

    verb = up if role == "coordinator" else join
    verb.make_context(verb.name or "", list(arguments), help_option_names=["-h", "--help"])


def _check_wired_limit(host: "ServiceHost", folder: Path, wired: int) -> None:
    from coordinator.client.api_client import ApiSession
    from coordinator.doctor.host_probe import HostProbe
    from coordinator.service.plan import explain_unsafe_wired_limit

    if not host.mac:
        raise CommandError(2, "--wired-limit-mb is for macOS: other systems have no Metal")
    inspection = HostProbe(ApiSession(folder, None, None, "json")).read_inspection()
    refused = explain_unsafe_wired_limit(wired, int(inspection["memory"]["safe"]) if inspection else 0)
    if refused is not None:
        raise CommandError(REFUSED, refused)


def _print_units(host: "ServiceHost", plan: "ServicePlan", output: str) -> None:
    from coordinator.service.launchd import build_wired_job, render_property_list

    units = {str(host.unit): host.render_unit(plan)}
    if plan.wired_limit_mb:
        units[str(host.wired_unit)] = render_property_list(build_wired_job(plan.wired_limit_mb))
    if output == "json":
        click.echo(json.dumps({"schema": 1, "units": units, "role": plan.role, "user": plan.user}))
        return
    for file, content in units.items():
        click.echo(f"# {file}\n{content}")


@service.command()
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", help="Output format.")
@click.pass_context
def uninstall(ctx: click.Context, output: str) -> None:
    """Stop the service and remove it. Print the folders of cluster, node, models and logs, which are kept."""
    from coordinator.service.installer import read_existing_unit
    from coordinator.service.installer import uninstall as take_away
    from coordinator.service.service_manager import ServiceHost

    host = ctx.obj if isinstance(ctx.obj, ServiceHost) else ServiceHost()
    with _convert_errors(), show_spinner("stopping the service"):
        state = read_existing_unit(host, host.unit).state
        done = take_away(host)
    folders = [folder for folder in (state, str(host.logs) if host.mac else "") if folder]
    if output == "json":
        click.echo(json.dumps({"schema": 1, "done": done, "kept": folders}))
        return
    for text in done or ["no service was installed"]:
        click.echo(text)
    for folder in folders if done else []:
        click.echo(f"kept      {folder}")


@service.command()
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", help="Output format.")
@click.pass_context
def status(ctx: click.Context, output: str) -> None:
    """Print whether the service runs. Exit code 0: running; 1: installed, not running; 5: not installed."""
    from coordinator.service.installer import read_existing_unit
    from coordinator.service.service_manager import ServiceHost

    host = ctx.obj if isinstance(ctx.obj, ServiceHost) else ServiceHost()
    with _convert_errors():
        unit, now = read_existing_unit(host, host.unit), host.read_state()
    answer: dict[str, Any] = {
        "schema": 1,
        "installed": bool(unit.text),
        "loaded": now.loaded,
        "running": now.running,
        "pid": now.pid,
        "user": unit.user,
        "state": unit.state,
        "unit": str(host.unit),
        "last_exit": now.last_exit,
    }
    click.echo(json.dumps(answer) if output == "json" else _render_state(answer))
    if not now.running:
        sys.exit(INSTALLED_NOT_RUNNING if unit.text or now.loaded else NOT_FOUND)


def _render_state(answer: dict[str, Any]) -> str:
    if not answer["installed"]:
        rest = ", but its unit is missing: `cluster service install` repairs that" if answer["loaded"] else ""
        return f"not installed{rest}"
    if answer["running"]:
        state = f"running, process {answer['pid']}"
    else:
        state = "loaded, not running" if answer["loaded"] else "not loaded: `cluster service install` repairs that"
    ended = f"\nlast exit {answer['last_exit']}" if answer["last_exit"] else ""
    return (
        f"service   {state}\nunit      {answer['unit']}\nuser      {answer['user']}\nstate     {answer['state']}{ended}"
    )


@service.command()
@click.pass_context
def restart(ctx: click.Context) -> None:
    """Stop the service gracefully and start it again.

    Running requests may end before the service stops. The command fails if the service does not end, or does not run
    again within 45 s.
    """
    from coordinator.service.installer import read_existing_unit, wait_until_running
    from coordinator.service.service_manager import ServiceHost

    host = ctx.obj if isinstance(ctx.obj, ServiceHost) else ServiceHost()
    with _convert_errors(), show_spinner("restarting the service"):
        if not read_existing_unit(host, host.unit).text:
            raise CommandError(NOT_FOUND, "no service is installed: `sudo cluster service install`")
        host.restart_service()
        service_state = wait_until_running(host, 45.0)
    click.echo(f"running, process {service_state.pid}")


@service.command()
@click.option("-f", "--follow", is_flag=True, help="Print new lines as they arrive.")
@click.option(
    "--lines", type=click.IntRange(1, 100_000), default=200, show_default=True, help="Number of newest lines."
)
@click.pass_context
def logs(ctx: click.Context, follow: bool, lines: int) -> None:
    """Print the output of the service: starts, stops, warnings. Complete logs are in STATE/logs (`cluster logs`)."""
    from coordinator.service.plan import UNIT
    from coordinator.service.service_manager import ServiceHost

    host = ctx.obj if isinstance(ctx.obj, ServiceHost) else ServiceHost()
    if host.mac:
        file = host.logs / "service.log"
        if not file.exists():
            raise CommandError(NOT_FOUND, f"there is no {file}: is the service installed?")
        command = [host.tools["tail"], "-n", str(lines), *(["-F"] if follow else []), str(file)]
    else:
        command = [host.tools["journalctl"], "--no-pager", "-u", UNIT, "-n", str(lines), *(["-f"] if follow else [])]
    sys.stdout.flush()
    try:
        os.execv(command[0], command)  # noqa: S606  no shell is wanted
    except OSError as error:
        raise CommandError(1, f"{command[0]}: {error.strerror}") from None


class _convert_errors:  # noqa: N801  used as a with-statement's word
    """Context manager that converts errors of the service package into the command's exit codes."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        from coordinator.service.service_manager import ServiceError

        if isinstance(error, ServiceError):
            raise CommandError(error.code, str(error)) from None
