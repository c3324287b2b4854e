"""Program of a node: `python -m node.run`, started by `cluster join`, `cluster leave` and `cluster up`.

The program reads the settings, joins the cluster if necessary, and runs agent and engine. With `--leave` the program
runs only the agent, leaves the cluster and ends. With `--leave --force` it only deletes the identity of the node. Exit
codes are those of `cluster --help`. With `--lifeline` the node stops when its standard input ends, so that a node of
`cluster up` stops after any end of the coordinator.
"""

import gc

if __name__ == "__main__":
    gc.disable()  # the imports create permanent objects, whose collections would take 15 % of their CPU time

import argparse
import asyncio
import json
import os
import signal
import sys
import tomllib
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version as installed
from pathlib import Path

import structlog
from msgspec.structs import replace

from host.event_loop import run_event_loop
from host.log_setup import hide_warnings, open_journal
from host.node_marks import mark_left
from host.private_files import open_missing_streams, resolve_home
from host.settings_loader import ResolvedSettings, SettingsError, from_environment, from_pairs, from_tree
from host.sleep_inhibitor import SleepInhibitor
from host.sleep_watch import SleepWatch
from node.agent.enrollment import EnrollError, IdentityError, NodeIdentity
from node.agent.identity import delete_identity
from node.agent.link_keeper import ExpelledError
from node.agent.rejoin import DENIED, LEAVE_TIMEOUT_SECONDS, OtherClusterError
from node.assembly import Node, assemble
from node.daemon_threads import DaemonExecutor
from node.inspect.running_settings import publish_settings
from node.join import choose_exit_code, prepare_identity, read_token
from node.memory.limits import Limiter
from node.memory.sensor import open_machine
from node.models.folders import use_hub_folder
from node.node_lock import NodeLock, NodeStartError, await_disk, name_unusable_files
from node.settings import COORDINATOR_SECTIONS, NodeSettings, resolve_settings
from node.sharing.keep_awake import SleepPolicy
from wire.frames import GoodbyeReason
from wire.join_token import JoinToken

DRAIN_TIMEOUT_SECONDS = 20.0
"""Maximum wait for running requests when the node stops, in seconds."""

log = structlog.get_logger("node.run")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a node until it is stopped, or leave the cluster with `--leave`. Return the exit code.

    `arguments` replace the arguments of the command line. `SettingsError` (exit code 2) and `NodeStartError` (its own
    code) are printed. The code is 130 after Ctrl-C, or if the program was stopped before it left the cluster. Raise
    `SystemExit` for invalid arguments.
    """
    open_missing_streams()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # before any thread begins, which inherits the mask
    options = _create_parser().parse_args(arguments)
    try:
        resolved = _load_settings(options)
        use_hub_folder(resolved.value.models.huggingface_cache, os.environ)
        with ExitStack() as held:
            with name_unusable_files():
                held.enter_context(NodeLock(options.state / "node"))
                open_journal(options.state / "logs" / "node.log", resolved.value.node.log_level)
            held.enter_context(publish_settings(options.state / "node", os.getpid(), resolved))
            return _print_end(options, run_event_loop(_run(options, resolved)))
    except (NodeStartError, SettingsError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return error.code if isinstance(error, NodeStartError) else 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


def _print_end(options: argparse.Namespace, code: int) -> int:
    """Print how the node ended without error, unless a program reads the output. Return the exit code."""
    if code == 0 and not options.lifeline and options.output == "text":
        joined = (options.state / "node" / "identity" / "identity.json").exists()
        print("stopped" if joined else "left the cluster", file=sys.stderr)
    return code


def _create_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cluster join", allow_abbrev=False)
    parser.add_argument("--state", type=_make_absolute, required=True)
    parser.add_argument("--url", help="address of the coordinator for nodes; default: found by Bonjour")
    parser.add_argument("--token-fd", type=int, help="file descriptor of the join token")
    parser.add_argument("--models", action="append", default=[], type=Path)
    parser.add_argument("--allow-missing-folders", action="store_true")
    parser.add_argument("--set", action="append", default=[], dest="pairs")
    parser.add_argument("--output", choices=["text", "json"], default="text")
    parser.add_argument("--lifeline", action="store_true")
    parser.add_argument("--leave", action="store_true", help="leave the cluster instead of serving")
    parser.add_argument("--force", action="store_true", help="with --leave: leave without notifying the coordinator")
    return parser


def _make_absolute(folder: str) -> Path:
    """Return an absolute path, because the engine runs in another folder."""
    return Path(os.path.abspath(folder))


def _load_settings(options: argparse.Namespace) -> ResolvedSettings[NodeSettings]:
    file: Path = options.state / "config.toml"
    try:
        tree = tomllib.loads(await_disk(lambda: file.read_text() if file.exists() else "", options.state))
    except (OSError, ValueError) as error:
        raise SettingsError(f"{file}: {error}") from None
    layers = [
        (str(file), from_tree(tree)),
        ("environment", from_environment(os.environ)),
        ("--set", from_pairs(options.pairs)),
    ]
    resolved = resolve_settings(layers, COORDINATOR_SECTIONS)
    settings = resolved.value
    if options.models and settings.engine.kind == "scripted":
        raise SettingsError("--models: the scripted engine serves engine.scripted.model and reads no model folders")
    folders = (*settings.models.folders, *(os.path.abspath(resolve_home(str(folder))) for folder in options.models))
    if not options.allow_missing_folders:  # an access to a lost network disk blocks
        missing = [folder for folder in folders if not await_disk(partial(os.path.isdir, resolve_home(folder)), folder)]
        if missing:
            raise SettingsError(f"models.folders: {missing[0]} is not a folder")
    origins = {**resolved.origins, **({"models.folders": "--models"} if options.models else {})}
    return ResolvedSettings(replace(settings, models=replace(settings.models, folders=folders)), origins)


async def _run(options: argparse.Namespace, resolved: ResolvedSettings[NodeSettings]) -> int:
    asyncio.get_running_loop().set_default_executor(DaemonExecutor())  # a lost network disk must not delay the end
    if options.leave and options.force:
        _delete_identity(options.state / "node")
        return 0
    token, code = read_token(options.token_fd), None
    while code is None:  # None: the identity that was here is denied, and the token makes a new one
        code = await _run_node(options, resolved, token)
    return code


async def _run_node(
    options: argparse.Namespace, resolved: ResolvedSettings[NodeSettings], token: JoinToken | None
) -> int | None:
    settings = resolved.value
    state: Path = options.state
    machine = open_machine(settings)
    hardware, limiter = machine.hardware, Limiter(settings, machine, resolved.origins, state / "node")
    try:
        with name_unusable_files():
            identity = await prepare_identity(
                state, options.url, token, settings, hardware, may_enroll=not options.leave
            )
    except (EnrollError, IdentityError) as error:
        raise NodeStartError(choose_exit_code(error), str(error)) from None
    except OtherClusterError as error:
        raise NodeStartError(6, str(error)) from None
    node = assemble(
        identity,
        settings,
        state,
        machine,
        limiter,
        hardware,
        version=installed("macpool"),
        on_ready=Announce(options.output, identity),
    )
    return await _serve(options, node, settings.node.stay_awake, new_identity=token is not None)


async def _serve(options: argparse.Namespace, node: Node, stay_awake: str, *, new_identity: bool) -> int | None:
    agent = node.agent
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    reason = GoodbyeReason.LEAVE if options.leave else GoodbyeReason.STOPPING

    def leave() -> None:
        nonlocal reason
        reason = GoodbyeReason.LEAVE
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGUSR1, leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    if options.lifeline:
        loop.add_reader(sys.stdin.fileno(), _on_lifeline, stop)
    if not options.leave:
        await node.sharing.start()
        node.poll.start()
        with name_unusable_files():
            await node.supervisor.start()
        await node.video.start()
        node.hasher.start()
    sleep_policy = SleepPolicy(stay_awake, node.is_working, loop.time, SleepInhibitor())
    watch = SleepWatch(agent.fall_asleep, agent.wake_up, on_look=sleep_policy.update)
    watch.start()
    run = asyncio.create_task(agent.run())
    waiting = {asyncio.create_task(event.wait()) for event in (stop, *((agent.welcomed,) if options.leave else ()))}
    code: int | None = 0
    try:
        limit = LEAVE_TIMEOUT_SECONDS if options.leave else None
        done, _ = await asyncio.wait({run, *waiting}, return_when=asyncio.FIRST_COMPLETED, timeout=limit)
        if options.leave and run not in done and not agent.welcomed.is_set():
            reason, code = GoodbyeReason.STOPPING, 130 if done else 3
            cause = "stopped before the coordinator was reached" if done else "the coordinator cannot be reached"
            _print_error(f"{cause}: run `cluster leave --force` to leave without notifying it")
        hide_warnings()
        if run not in done:
            await agent.stop(DRAIN_TIMEOUT_SECONDS, reason)
        await run
        if reason is GoodbyeReason.LEAVE:
            _delete_identity(options.state / "node")
    except ExpelledError as error:
        log.warning("removed from the cluster", reason=str(error))
        code = _handle_denial(error, options, welcomed=agent.welcomed.is_set(), new_identity=new_identity)
    finally:
        await node.sharing.stop()
        watch.stop()
        sleep_policy.stop()
        await node.video.stop()
        await node.hasher.stop()
        await node.model_orders.stop()
        node.poll.stop()
        for task in waiting:
            task.cancel()
        await node.supervisor.stop()
    return code


def _handle_denial(
    error: ExpelledError, options: argparse.Namespace, *, welcomed: bool, new_identity: bool
) -> int | None:
    """Print the coordinator's final denial of this node, or delete the denied identity. Return the exit code.

    Return None if the node has to enroll again with its join token, because its earlier identity was denied.
    """
    if error.reason in DENIED and (options.leave or (new_identity and not welcomed)):
        delete_identity(options.state / "node" / "identity")
        if options.leave:
            mark_left(options.state / "node")
        return 0 if options.leave else None
    _print_error(str(error))
    return 8 if error.reason == "protocol" else 4


def _delete_identity(node: Path) -> None:
    """Remove the identity of a node that leaves on purpose, and record that it left."""
    mark_left(node)
    delete_identity(node / "identity")


def _print_error(text: str) -> None:
    print(f"Error: {text}", file=sys.stderr, flush=True)


def _on_lifeline(stop: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), 64):
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        stop.set()


class Announce:
    """Callback of the agent that prints once that the node is ready, as JSON if `output` is `json`, else as text."""

    def __init__(self, output: str, identity: NodeIdentity) -> None:
        self._output = output
        self._identity = identity
        self._done = False

    def __call__(self, address: str) -> None:
        """Print once that the node is ready and linked to the coordinator at `address` (`host:port`).

        If the output cannot be written, log the error: the node also serves without a reader of its output.
        """
        if self._done:
            return
        self._done = True
        identity = self._identity
        line = f"{identity.name} is in the pool of {address}; Ctrl-C stops it"
        if self._output == "json":
            facts = {
                "schema": 1,
                "ready": True,
                "node": identity.node,
                "name": identity.name,
                "cluster": identity.cluster,
                "cluster_url": f"macpool://{address}",
            }
            line = json.dumps(facts)
        try:
            print(line, flush=True)
        except OSError as error:
            log.warning("ready line not printed", error=str(error))


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    sys.exit(main())
