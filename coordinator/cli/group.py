"""Base classes of the command line: groups with suggestions, uniform errors, and messages for old spellings."""

import difflib
import shlex
import sys
from collections.abc import Sequence

import click

SYNONYMS = {
    "ls": "list",
    "get": "show",
    "inspect": "show",
    "describe": "show",
    "info": "show",
    "add": "create",
    "new": "create",
    "rm": "remove",
    "delete": "remove",
    "del": "remove",
    "stop": "cancel",
    "download": "get",
}
"""Verbs of other programs, with the verbs of this program that replace them.

`remove` stands for `revoke` in a group that has a command `revoke`.
"""
MOVED: dict[tuple[str, ...], tuple[str, str]] = {
    **{
        ("nodes", verb): ("node", verb)
        for verb in ("allow-video", "cordon", "deny-video", "drain", "label", "logs", "remove", "show", "uncordon")
    },
    ("nodes", "inspect"): ("node", "show"),
    **{
        ("models", verb): ("model", verb)
        for verb in (
            *("bench", "files", "load", "plan", "profile", "quantizations", "quantize"),
            *("rm", "show", "unload", "unwant", "verify", "want"),
        )
    },
    ("load",): ("model", "load"),
    ("unload",): ("model", "unload"),
    ("profile",): ("model", "profile"),
    **{("videos", verb): ("video", verb) for verb in ("list", "show", "create", "wait", "get", "cancel")},
    ("videos",): ("video", "list"),
    ("lease", "list"): ("video", "leases"),
    ("lease",): ("video", "leases"),
}
"""Old spellings of commands, with the new ones.

An old spelling is refused with the complete new command. An alias could never be removed, because scripts would use it.
"""


class CommandGroup(click.Group):
    """Command group whose error for an unknown verb suggests the nearest verb."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return name, command and remaining arguments of a verb.

        Raise `click.UsageError` for an unknown verb, with the nearest verb, and for an old spelling, with the new one.
        """
        word = args[0] if args else ""
        if word and not word.startswith("-") and self.get_command(ctx, word) is None:
            if ctx.parent is None:
                _refuse_moved(ctx, args)
            path, near = ctx.command_path, find_nearest_verb(word, self.list_commands(ctx))
            ctx.fail(f"there is no `{path} {word}`" + (f"; did you mean `{path} {near}`?" if near else ""))
        if ctx.parent is None and tuple(args[:2]) in MOVED:
            _refuse_moved(ctx, args)
        return super().resolve_command(ctx, args)


def find_nearest_verb(word: str, verbs: Sequence[str]) -> str | None:
    """Return the verb of `verbs` that replaces `word` (`SYNONYMS`), or else the most similar one.

    Return None if none is similar.
    """
    meant = SYNONYMS.get(word)
    if meant == "remove" and "revoke" in verbs:
        meant = "revoke"
    if meant in verbs:
        return meant
    near = difflib.get_close_matches(word, verbs, 1)
    return near[0] if near else None


def _refuse_moved(ctx: click.Context, args: list[str]) -> None:
    for length in (2, 1):
        new = MOVED.get(tuple(args[:length]))
        if new is not None:
            old, rest = " ".join(args[:length]), args[length:]
            line = shlex.join([ctx.command_path, *new, *rest])
            raise click.UsageError(
                f"`{ctx.command_path} {old}` is `{ctx.command_path} {' '.join(new)}` now; type:\n  {line}"
            )


def print_error(error: click.ClickException) -> None:
    """Print an error to standard error.

    A usage error is followed by the usage line, except that of a group, and by the command that prints the help. For a
    group that was called without a verb, print only the help of the group.
    """
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return
    message = _describe_option(error) if isinstance(error, click.NoSuchOption) else error.format_message()
    click.echo(f"Error: {message}", err=True)
    if isinstance(error, click.UsageError) and error.ctx is not None:
        if not isinstance(error.ctx.command, click.Group):
            click.echo(error.ctx.get_usage(), err=True)
        click.echo(f"Help:  {error.ctx.command_path} --help", err=True)


def _describe_option(error: click.NoSuchOption) -> str:
    """Return the text about an unknown option, with the option of the command that it abbreviates or resembles."""
    word = error.option_name.lstrip("-")
    params = [] if error.ctx is None else error.ctx.command.params
    known = [name[2:] for param in params for name in param.opts if name.startswith("--")]
    initials = {"".join(part[0] for part in name.split("-")): name for name in known if "-" in name}
    near = [initials[word]] if word in initials else difflib.get_close_matches(word, known, 1)
    return f"there is no option {error.option_name}" + (f"; did you mean --{near[0]}?" if near else "")


def confirm(question: str, *, yes: bool) -> None:
    """Ask the user to confirm an action, unless `yes` is true.

    Raise `click.ClickException` after a no, and `click.UsageError` if there is no terminal.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"{question} Nothing was changed: there is no terminal to ask on, add --yes")
    if not click.confirm(question, err=True):
        raise click.ClickException("nothing was changed")


def yes_option(command: click.decorators.FC) -> click.decorators.FC:
    """Decorate a command that asks for confirmation with the option --yes."""
    return click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")(command)
