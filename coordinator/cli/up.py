"""`cluster up`: settings and addresses from the command line, then the composition root until a signal."""

import json
import os
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from coordinator.cli.session import REFUSED, Problem, default_state

if TYPE_CHECKING:
    from coordinator.run import Options
    from coordinator.settings import CoordinatorSettings
    from wire.settings import Resolved

STRANGERS = frozenset({"0.0.0.0", "::"})  # noqa: S104  the addresses that mean "everybody"


class Address(click.ParamType[tuple[str, int]]):
    """`HOST:PORT`, `[V6]:PORT`; port 0 means any."""

    name = "host:port"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        """Read one; a click usage error otherwise."""
        if isinstance(value, tuple):
            return value  # pyright: ignore[reportUnknownVariableType]  a default that was converted before
        host, colon, port = str(value).rpartition(":")
        if not colon or not port.isdecimal() or int(port) > 65535 or not host.strip("[]"):
            self.fail(f"{value!r} is not HOST:PORT", param, ctx)
        return host.strip("[]"), int(port)


@click.command()
@click.option("--state", envvar="MACPOOL_STATE", type=click.Path(path_type=Path), help="State folder; made if missing.")
@click.option("--listen", type=Address(), help="Where clients connect.  [default: 127.0.0.1:8080]")
@click.option("--lan", is_flag=True, help="Let the whole local network use the endpoint: HTTPS, with API keys.")
@click.option(
    "--cluster-listen", type=Address(), default="0.0.0.0:8081", show_default=True, help="Where nodes connect (TLS)."
)
@click.option("--no-local-node", is_flag=True, help="Only coordinate; run no node on this machine.")
@click.option("--models", multiple=True, type=click.Path(path_type=Path), help="A folder of models for the local node.")
@click.option("--set", "pairs", multiple=True, metavar="KEY=VALUE", help="A setting; see docs/settings.md.")
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", help="Form of the ready line.")
def up(
    state: Path | None,
    listen: tuple[str, int] | None,
    lan: bool,
    cluster_listen: tuple[str, int],
    no_local_node: bool,
    models: tuple[Path, ...],
    pairs: tuple[str, ...],
    output: str,
) -> None:
    """Start the coordinator, and a node on this machine, until Ctrl-C.

    The first start makes the cluster: its certificate authority, its id and the first API key, which is shown once.
    """
    if lan and listen is not None:
        raise click.UsageError(
            "--lan and --listen exclude each other: --lan is --listen 0.0.0.0:8080 (name another port so)"
        )
    listen = listen or (("0.0.0.0", 8080) if lan else ("127.0.0.1", 8080))  # noqa: S104
    if no_local_node and models:
        raise click.UsageError("--models is for the node on this machine, which --no-local-node leaves out")

    from coordinator.configuration import rows_shown
    from coordinator.run import Options
    from wire.settings import explained

    folder = state or default_state()
    resolved = _resolved(folder, pairs)
    forwarded = _for_the_node(pairs)
    if forwarded and no_local_node:
        raise Problem(2, f"--set {forwarded[0]} is for the node on this machine, which --no-local-node leaves out")
    arguments = [item for pair in forwarded for item in ("--set", pair)]
    arguments += [item for model in models for item in ("--models", str(model))]
    options = Options(folder, listen, cluster_listen, not no_local_node, tuple(arguments), resolved.value,
                      rows_shown(explained(resolved)))  # fmt: skip

    def ready(facts: dict[str, Any]) -> None:
        if output == "json":
            print(json.dumps(facts), flush=True)
        else:
            _welcome(facts, listen)

    _run(options, ready)


def _resolved(folder: Path, pairs: tuple[str, ...]) -> "Resolved[CoordinatorSettings]":
    """Put the settings together: file, then environment, then command line."""
    from coordinator.settings import OTHERS, CoordinatorSettings
    from wire.settings import SettingsError, from_environment, from_pairs, from_tree, resolve

    try:
        flags = from_pairs(pairs)
        layers = [
            (str(folder / "config.toml"), from_tree(_tree(folder / "config.toml"))),
            ("environment", from_environment(os.environ)),
            ("--set", flags),
        ]
        return resolve(CoordinatorSettings, layers, OTHERS)
    except SettingsError as error:
        raise Problem(2, str(error)) from None


def _for_the_node(pairs: tuple[str, ...]) -> list[str]:
    """Give the settings that belong to the node on this machine."""
    from coordinator.settings import OTHERS

    return [pair for pair in pairs if pair.partition("=")[0].strip().split(".")[0] in OTHERS]


def _run(options: "Options", ready: Callable[[dict[str, Any]], None]) -> None:
    """Run until a signal; Problem when it cannot start."""
    import uvloop

    from coordinator.authority import AuthorityError
    from coordinator.keeping.fence import SupersededError
    from coordinator.run import serve
    from coordinator.store import StoreError
    from wire.settings import SettingsError

    try:
        uvloop.run(serve(options, ready))
    except SupersededError as error:
        raise Problem(REFUSED, str(error)) from None
    except SettingsError as error:
        raise Problem(2, str(error)) from None
    except (StoreError, AuthorityError) as error:
        raise Problem(1, str(error)) from None
    except OSError as error:
        raise Problem(1, error.strerror or str(error)) from None


def _tree(file: Path) -> dict[str, Any]:
    from wire.settings import SettingsError

    try:
        return tomllib.loads(file.read_text()) if file.exists() else {}
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"{file}: {error}") from None


def _welcome(facts: dict[str, Any], listen: tuple[str, int]) -> None:
    click.echo(f"endpoint  {facts['base_url']}")
    if listen[0] in STRANGERS:
        import socket

        scheme, port = facts["base_url"].partition(":")[0], facts["base_url"].rpartition(":")[2].removesuffix("/v1")
        click.echo(f"          {scheme}://{socket.gethostname().partition('.')[0]}.local:{port}/v1")
        if not facts["tls"]:
            click.secho(
                "          open to the local network without TLS: every request needs an API key, but whoever can "
                "listen on this network can read it",
                fg="red",
            )
    if facts["trust"]:
        click.echo(f"trust it  {facts['trust']}  (once on every machine whose programs use it)")
    if "api_key" in facts:
        click.echo(f"API key   {facts['api_key']}  (shown only now)")
    click.echo(f"add a Mac {facts['join']}")
    click.echo("Ctrl-C stops it")
    sys.stdout.flush()
