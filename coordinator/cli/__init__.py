"""`cluster`: the command. Only click is imported here, so that `--help` and completion are instant."""

import importlib
import os
import sys
from typing import Any

import click

from coordinator.cli.harmless import harmless_output

COMMANDS = {
    "up": ("coordinator.cli.up:up", "Start the coordinator, and a node on this machine; makes the cluster at first."),
    "join": ("coordinator.cli.join:join", "Join this machine to a cluster and run its node."),
    "leave": ("coordinator.cli.join:leave", "Take this machine out of its cluster for good."),
    "status": ("coordinator.cli.nodes:status", "Say in a few lines how the pool is."),
    "nodes": ("coordinator.cli.nodes:nodes", "List the nodes with their memory; inspect, cordon or remove one."),
    "pause": ("coordinator.cli.owner:pause", "Have a Mac take nothing new, and its owner its memory back."),
    "resume": ("coordinator.cli.owner:resume", "End a Mac's pause."),
    "approve": ("coordinator.cli.nodes:approve", "Let a machine in that asks with a short code."),
    "models": ("coordinator.cli.models:models", "List the models and where they are."),
    "load": ("coordinator.cli.models:load", "Load a model into the memory of a node."),
    "unload": ("coordinator.cli.models:unload", "Give back the memory that a model takes."),
    "profile": ("coordinator.cli.models:profile", "Measure anew what a model takes on a node."),
    "place": ("coordinator.cli.use:place", "Show where a request would go, with every node's arithmetic."),
    "simulate": ("coordinator.cli.simulate:simulate", "Play a pool in virtual time, under every placement policy."),
    "explain": ("coordinator.cli.use:explain", "Show what became of a request, and why it went where it went."),
    "replay": ("coordinator.cli.use:replay", "Take recorded decisions again by another policy."),
    "videos": ("coordinator.cli.videos:videos", "List videos; create, show, wait for, get or cancel one."),
    "lease": ("coordinator.cli.videos:lease", "Show the memory that nodes lend to videos."),
    "video": ("coordinator.cli.video:video", "Prepare a machine for videos; measure what they take."),
    "chat": ("coordinator.cli.use:chat", "Ask a model something."),
    "open": ("coordinator.cli.use:open_page", "Open the pool's page in a browser."),
    "env": ("coordinator.cli.use:env", "Print the variables that point OpenAI clients at this pool."),
    "token": ("coordinator.cli.access:token", "Make, list and revoke join tokens."),
    "key": ("coordinator.cli.access:key", "Make, list, limit and revoke API keys; show what they used."),
    "trust-ca": ("coordinator.cli.trust:trust_ca", "Let this machine's programs trust the pool's HTTPS endpoint."),
    "top": ("coordinator.cli.watch:top", "Show the pool as it is, again and again."),
    "logs": ("coordinator.cli.watch:logs", "Print a node's log, or the coordinator's own."),
    "events": ("coordinator.cli.watch:events", "Tell what happens in the pool."),
    "metrics-config": ("coordinator.cli.watch:metrics_config", "Write what Prometheus needs to scrape this pool."),
    "audit": ("coordinator.cli.access:audit", "Show who did what: joins, keys and administrative acts."),
    "service": ("coordinator.cli.service:service", "Run this machine's part of the pool as a service of the system."),
    "config": ("coordinator.cli.config:config", "Show the settings with their origins; look a file of them through."),
    "doctor": ("coordinator.cli.doctor:doctor", "Look for what is wrong with this machine, and say what to do."),
    "backup": ("coordinator.cli.keeping:backup", "Write the whole cluster into one file."),
    "restore": ("coordinator.cli.keeping:restore", "Put a backup in place, here or on another machine."),
    "version": ("coordinator.cli.use:version", "Print versions."),
    "completion": ("coordinator.cli.use:completion", "Print the completion script for a shell."),
}
"""Verb → where it is implemented, and its line in --help (so that nothing is imported to print it)."""


class LazyGroup(click.Group):
    """Imports a command only when it runs."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Honour NO_COLOR for whatever click prints; rich looks at it itself."""
        if os.environ.get("NO_COLOR"):
            extra["color"] = False
        return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a verb; nothing that it prints can harm a terminal."""
        with harmless_output():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All verbs, in the order of a pool's life."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one verb."""
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        return getattr(importlib.import_module(module), name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Print the table without importing anything."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Add the nearest verb to the error for an unknown one."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            import difflib

            near = difflib.get_close_matches(args[0], COMMANDS, 1)
            ctx.fail(f"no such command {args[0]!r}" + (f": did you mean {near[0]!r}?" if near else ""))
        return super().resolve_command(ctx, args)


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
def cluster() -> None:
    """Macpool: the Macs of a household or a lab as one OpenAI-compatible endpoint.

    Begin with `cluster up` on one machine and `cluster join` on the others.

    \b
    Exit codes: 0 ok, 1 failed, 2 usage, 3 coordinator not reached, 4 key or token refused, 5 not found,
    6 refused by policy or memory, 7 timed out, 8 other protocol version, 9 CA pin mismatch (never retry: somebody
    may be in between), 10 blocked by macOS local network privacy, 130 interrupted.
    """


def main() -> None:
    """Run the command with the exit codes that the help lists."""
    try:
        cluster.main(prog_name="cluster", standalone_mode=False)
    except click.ClickException as error:
        with harmless_output():
            error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


if __name__ == "__main__":
    main()
