"""`cluster up`: read settings and addresses, then run the coordinator (`coordinator.run`) until a signal."""

import json
import os
import sys
import tomllib
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from coordinator.cli.spinner import show_spinner
from coordinator.client.api_client import get_default_state
from coordinator.client.errors import REFUSED, CommandError

if TYPE_CHECKING:
    from coordinator.startup.options import RunOptions
    from coordinator.state.settings import CoordinatorSettings
    from host.settings_loader import ResolvedSettings

ALL_INTERFACES = frozenset({"0.0.0.0", "::"})  # noqa: S104  the addresses of all interfaces
"""Addresses that stand for all interfaces of this machine, over IPv4 and IPv6."""


class ListenAddress(click.ParamType[tuple[str, int]]):
    """Parameter type for a listening address: `HOST:PORT` or `[IPV6]:PORT`. Port 0 means any free port."""

    name = "host:port"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        """Return host (without brackets) and port. Raise `click.BadParameter` if `value` is not an address."""
        if isinstance(value, tuple):
            return value  # pyright: ignore[reportUnknownVariableType]  a default that was converted before
        host, colon, port = str(value).rpartition(":")
        if not colon or not port.isdecimal() or int(port) > 65535 or not host.strip("[]"):
            self.fail(f"{value!r} is not HOST:PORT", param, ctx)
        return host.strip("[]"), int(port)


@click.command()
@click.option(
    "--state", envvar="MACPOOL_STATE", type=click.Path(path_type=Path), help="State folder; created if missing."
)
@click.option("--listen", type=ListenAddress(), help="Where clients connect.  [default: 127.0.0.1:8080]")
@click.option("--lan", is_flag=True, help="Serve the local network: HTTPS, with API keys.")
@click.option(
    "--cluster-listen",
    type=ListenAddress(),
    default="0.0.0.0:8081",
    show_default=True,
    help="Where nodes connect (TLS).",
)
@click.option(
    "--local-node/--no-local-node",
    default=None,
    help="Run a node on this machine (default, unless the node has left the cluster).",
)
@click.option("--models", multiple=True, type=click.Path(path_type=Path), help="A folder of models for the local node.")
@click.option(
    "--allow-missing-folders",
    is_flag=True,
    help="Start even if a model folder is missing, for example on a disconnected disk. The service uses this option.",
)
@click.option("--set", "pairs", multiple=True, metavar="KEY=VALUE", help="A setting; see docs/settings.md.")
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", help="Format of the ready line.")
def up(
    state: Path | None,
    listen: tuple[str, int] | None,
    lan: bool,
    cluster_listen: tuple[str, int],
    local_node: bool | None,
    models: tuple[Path, ...],
    allow_missing_folders: bool,
    pairs: tuple[str, ...],
    output: str,
) -> None:
    """Start the coordinator, and a node on this machine, until Ctrl-C.

    The first start creates the cluster: its certificate authority, its id and the first API key, which is shown once.
    The options --lan (0.0.0.0:8080) and --listen exclude each other, as do --no-local-node and --models.
    """
    if lan and listen is not None:
        raise click.UsageError(
            "--lan and --listen exclude each other: --lan means --listen 0.0.0.0:8080 (for another port, use --listen)"
        )
    listen = listen or (("0.0.0.0", 8080) if lan else ("127.0.0.1", 8080))  # noqa: S104
    if local_node is False and models:
        raise click.UsageError("--models is for the node on this machine, which --no-local-node omits")

    from host.imports import import_structlog

    import_structlog()
    from coordinator.startup.options import RunOptions
    from coordinator.state.config_file import redact_rows
    from host.node_marks import delete_left_mark, has_left
    from host.settings_loader import build_setting_rows

    folder = state or get_default_state()
    resolved = _resolve_settings(folder, pairs)
    forwarded = _select_node_settings(pairs)
    if forwarded and local_node is False:
        raise CommandError(2, f"--set {forwarded[0]} is for the node on this machine, which --no-local-node omits")
    with_node = local_node if local_node is not None else not has_left(folder / "node")
    if with_node:
        _check_node(folder, models, pairs, allow_missing_folders=allow_missing_folders)
    if local_node:
        delete_left_mark(folder / "node")
    arguments = [item for pair in forwarded for item in ("--set", pair)]
    arguments += [item for model in models for item in ("--models", str(model))]
    arguments += ["--allow-missing-folders"] * allow_missing_folders
    options = RunOptions(
        folder,
        listen,
        cluster_listen,
        with_node,
        tuple(arguments),
        resolved.value,
        redact_rows(build_setting_rows(resolved)),
    )

    waiting = ExitStack()

    def ready(facts: dict[str, Any]) -> None:
        waiting.close()
        if output == "json":
            print(json.dumps(facts), flush=True)
        else:
            _print_welcome(facts, listen)
            if not with_node and local_node is None:
                click.echo("this Mac's own node has left the cluster; --local-node lets it join again")
            if facts["local_node_ready"] is False:
                click.secho(
                    f"this Mac's own node does not answer yet: see its state in `cluster nodes` and the cause in "
                    f"{folder / 'logs' / 'node.log'}",
                    fg="yellow",
                )

    with waiting:
        if with_node:
            waiting.enter_context(show_spinner("starting this Mac's node"))
        _run_coordinator(options, ready)
    if output == "text":
        click.echo("stopped", err=True)


def _check_node(folder: Path, models: tuple[Path, ...], pairs: tuple[str, ...], *, allow_missing_folders: bool) -> None:
    """Check the node of this machine before anything is created.

    Raise `CommandError` if a setting is wrong, the node belongs to another cluster, or a model folder is missing and
    must not be.
    """
    from coordinator.client.config_inspect import inspect_settings
    from coordinator.cluster.local_node import LocalNodeElsewhereError, check_node_cluster

    if not allow_missing_folders:
        _check_model_folders("--models", map(str, models))
    if not (folder / "cluster.db").exists():
        try:
            check_node_cluster(folder, "")
        except LocalNodeElsewhereError as error:
            raise CommandError(REFUSED, str(error)) from None
    report = inspect_settings(folder, folder / "config.toml", os.environ, pairs, on_this_machine=True)
    if report.faults:
        raise CommandError(2, "\n".join(fault.render() for fault in report.faults))
    for row in report.rows:
        if row["key"] == "models.folders" and not allow_missing_folders:
            _check_model_folders(f"models.folders ({row['origin']})", row["value"])


def _check_model_folders(origin: str, places: Iterable[str]) -> None:
    from host.private_files import resolve_home

    for place in places:
        if not os.path.isdir(resolve_home(place)):
            raise CommandError(2, f"{origin}: {place} is not a folder")


def _resolve_settings(folder: Path, pairs: tuple[str, ...]) -> "ResolvedSettings[CoordinatorSettings]":
    """Merge the settings of file, environment and command line, in this order. Raise `CommandError` if one is wrong."""
    from coordinator.state.settings import NODE_SECTIONS, CoordinatorSettings
    from host.settings_loader import SettingsError, from_environment, from_pairs, from_tree, resolve_layers

    try:
        flags = from_pairs(pairs)
        layers = [
            (str(folder / "config.toml"), from_tree(_read_tree(folder / "config.toml"))),
            ("environment", from_environment(os.environ)),
            ("--set", flags),
        ]
        return resolve_layers(CoordinatorSettings, layers, NODE_SECTIONS)
    except SettingsError as error:
        raise CommandError(2, str(error)) from None


def _select_node_settings(pairs: tuple[str, ...]) -> list[str]:
    """Return those values of --set that are settings of the node on this machine."""
    from coordinator.state.settings import NODE_SECTIONS

    return [pair for pair in pairs if pair.partition("=")[0].strip().split(".")[0] in NODE_SECTIONS]


def _run_coordinator(options: "RunOptions", ready: Callable[[dict[str, Any]], None]) -> None:
    """Run the coordinator until a signal. Raise `CommandError` if a part cannot start, or the coordinator fails."""
    from host.imports import pause_collection

    with pause_collection():
        from coordinator.backup.generation_fence import SupersededError
        from coordinator.cluster.local_node import LocalNodeElsewhereError
        from coordinator.run import serve
        from coordinator.state.store_errors import StoreError
        from coordinator.tls.cluster_ca import AuthorityError
        from host.event_loop import run_event_loop
        from host.settings_loader import SettingsError

    try:
        run_event_loop(serve(options, ready))
    except (SupersededError, LocalNodeElsewhereError) as error:
        raise CommandError(REFUSED, str(error)) from None
    except SettingsError as error:
        raise CommandError(2, str(error)) from None
    except (StoreError, AuthorityError) as error:
        raise CommandError(1, str(error)) from None
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        raise CommandError(1, f"{place}{error.strerror or error}") from None


def _read_tree(file: Path) -> dict[str, Any]:
    from host.settings_loader import SettingsError

    try:
        return tomllib.loads(file.read_text()) if file.exists() else {}
    except (OSError, ValueError) as error:
        raise SettingsError(f"{file}: {error}") from None


def _print_welcome(facts: dict[str, Any], listen: tuple[str, int]) -> None:
    click.echo(f"endpoint  {facts['base_url']}")
    if listen[0] in ALL_INTERFACES:
        from host.local_names import read_local_name

        scheme, port = facts["base_url"].partition(":")[0], facts["base_url"].rpartition(":")[2].removesuffix("/v1")
        click.echo(f"          {scheme}://{read_local_name()}.local:{port}/v1")
        if not facts["tls"]:
            click.secho(
                "          open to the local network without TLS: every request needs an API key, but other machines "
                "on this network can read it",
                fg="red",
            )
    if facts["trust"]:
        click.echo(f"trust it  {facts['trust']}  (once on every machine with a client)")
    if "api_key" in facts:
        click.echo(f"API key   {facts['api_key']}  (shown only once)")
    click.echo(f"add a Mac {facts['join']}")
    click.echo("Ctrl-C stops it")
    sys.stdout.flush()
