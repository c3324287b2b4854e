"""The command `cluster`. Only click is imported here, because `--help` and completion must be fast."""

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from coordinator.cli.group import CommandGroup, print_error
from coordinator.client.terminal_text import filter_output
from host.private_files import open_missing_streams

SECTIONS = {
    "Every day": {
        "up": ("coordinator.cli.commands.up:up", "Start the coordinator, and a node on this machine."),
        "join": ("coordinator.cli.commands.join:join", "Join this machine to a cluster and run its node."),
        "approve": ("coordinator.cli.commands.nodes:approve", "Admit a machine that shows a six-digit code."),
        "leave": ("coordinator.cli.commands.join:leave", "Leave the cluster with this machine."),
        "status": ("coordinator.cli.commands.nodes:status", "Print the state of the pool in a few lines."),
        "nodes": ("coordinator.cli.commands.nodes:nodes", "List the nodes with their memory."),
        "models": ("coordinator.cli.commands.models:models", "List the models and their nodes."),
        "pull": ("coordinator.cli.commands.pulls:pull", "Get a model from the hub onto the nodes."),
        "chat": ("coordinator.cli.commands.use:chat", "Send a prompt to a model and print the answer."),
        "top": ("coordinator.cli.commands.logs_and_top:top", "Show the pool live."),
        "open": ("coordinator.cli.commands.use:open_page", "Open the pool's page in a browser."),
        "pause": ("coordinator.cli.commands.pause:pause", "Stop work on a Mac and free its memory."),
        "resume": ("coordinator.cli.commands.pause:resume", "End a Mac's pause."),
        "doctor": ("coordinator.cli.commands.doctor:doctor", "Check this machine, and print what to do."),
        "help": ("coordinator.cli.commands.use:help_", "Print the help of a command."),
    },
    "Groups": {
        "node": ("coordinator.cli.commands.nodes:node", "List, show, cordon, drain, label or remove nodes."),
        "model": (
            "coordinator.cli.commands.model_tools.bench:model",
            "List, load, keep loaded, measure, verify, quantize or delete models.",
        ),
        "cache": ("coordinator.cli.commands.cache:cache", "Show or delete cached prompts, in memory and on the disk."),
        "pulls": (
            "coordinator.cli.commands.pulls:pulls",
            "List, follow or cancel pulls.",
        ),
        "key": (
            "coordinator.cli.commands.tokens_and_keys:key",
            "Create, list, limit, rotate or revoke API keys; show usage.",
        ),
        "token": ("coordinator.cli.commands.tokens_and_keys:token", "Create, list or revoke join tokens."),
        "video": (
            "coordinator.cli.commands.video.machines:video",
            "Create, list or fetch videos; prepare machines for them.",
        ),
        "service": (
            "coordinator.cli.commands.service:service",
            "Run this machine's part of the pool as a system service.",
        ),
        "config": (
            "coordinator.cli.commands.config:config",
            "Show the settings with their origins, or check a settings file.",
        ),
    },
    "Clients": {
        "login": (
            "coordinator.cli.commands.clients.login:login",
            "Store URL, key and authority of a remote coordinator.",
        ),
        "logout": ("coordinator.cli.commands.clients.login:logout", "Delete the stored login."),
        "env": ("coordinator.cli.commands.use:env", "Print the variables that point clients at this pool."),
        "trust-ca": (
            "coordinator.cli.commands.clients.trust_ca:trust_ca",
            "Trust the pool's HTTPS endpoint on this machine.",
        ),
    },
    "Requests": {
        "explain": ("coordinator.cli.commands.use:explain", "Show where a request went, and why."),
        "place": ("coordinator.cli.commands.use:place", "Show where a request would go, with every node's numbers."),
        "replay": ("coordinator.cli.commands.use:replay", "Repeat recorded placement decisions with another policy."),
        "simulate": ("simulation.command:simulate", "Simulate a pool in virtual time."),
    },
    "Operation": {
        "logs": ("coordinator.cli.commands.logs_and_top:logs", "Print the log of the coordinator or of a node."),
        "events": ("coordinator.cli.commands.logs_and_top:events", "Print the events of the pool."),
        "audit": (
            "coordinator.cli.commands.tokens_and_keys:audit",
            "Print the audit log: joins, keys, administration.",
        ),
        "metrics-config": (
            "coordinator.cli.commands.logs_and_top:metrics_config",
            "Write the configuration with which Prometheus scrapes this pool.",
        ),
        "backup": ("coordinator.cli.commands.backup:backup", "Write a backup of the cluster into one file."),
        "restore": ("coordinator.cli.commands.backup:restore", "Restore a backup on this machine."),
        "version": ("coordinator.cli.commands.use:version", "Print versions."),
        "completion": ("coordinator.cli.commands.use:completion", "Print the completion script for a shell."),
    },
}
"""Implementation (module:name) and summary of each command, by section of the help.

The help is printed without importing the implementations.
"""
COMMANDS = {name: command for section in SECTIONS.values() for name, command in section.items()}
"""Implementation and summary of each command, by the command's name."""
NAMES = ("cluster", "macpool")
"""Names of the command. There are two, because graphviz installs another program `cluster` on many machines."""
INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended."""


class LazyGroup(CommandGroup):
    """Top-level group of all commands.

    The module of a command is imported only when the command runs, or for its help or completion.
    """

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command and print its error. Exit the process unless the exit code is 0.

        The exit codes are those that `cluster --help` lists. A closed output pipe counts as success. An unexpected
        exception is raised unchanged.
        """
        try:
            code = super().main(args, prog_name, complete_var, False, **extra)
        except click.ClickException as error:
            with filter_output():
                print_error(error)
            code = error.exit_code
        except (click.Abort, KeyboardInterrupt):
            click.echo("stopped", err=True)
            code = INTERRUPTED
        except PermissionError as error:
            with filter_output():
                place = error.filename or "the operation"
                click.echo(f"Error: {place} is not permitted to this user: {error.strerror}", err=True)
            code = 1
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = 0
        if code:
            sys.exit(code)

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Create click's context, without colours if NO_COLOR is set. (rich reads this variable itself.)"""
        if os.environ.get("NO_COLOR"):
            extra["color"] = False
        return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command. Its output passes `filter_output`, which replaces control characters."""
        with filter_output():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of a command and return the command; None if there is no command of this name."""
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        return getattr(importlib.import_module(module), name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands by section for the help, without an import of their modules."""
        for title, verbs in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(14), line) for name, (_, line) in verbs.items()])


def _print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from importlib.metadata import version

        click.echo(f"macpool {version('macpool')}")
        ctx.exit()


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Print the version and exit.",
)
def cluster() -> None:
    """Macpool: the Macs of a household or a lab as one OpenAI-compatible endpoint.

    Run `cluster up` on one machine and `cluster join` on each other machine. The command is also installed as
    `macpool`.

    \b
    Exit codes: 0 ok, 1 failed, 2 usage, 3 coordinator not reached, 4 key or token refused, 5 not found.
    Also: 6 refused by policy or memory, 7 timed out, 8 other protocol version, 130 interrupted.
    Exit code 9: CA pin mismatch. Do not retry, because another machine may intercept the connection.
    Exit code 10: blocked by macOS local network privacy.
    """


def main() -> None:
    """Run the command under the name by which the program was called, `cluster` or `macpool`.

    A second Ctrl-C during the handling of the first ends the process without a traceback.
    """
    open_missing_streams()
    called = Path(sys.argv[0]).name
    try:
        cluster.main(prog_name=called if called in NAMES else NAMES[0])
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
