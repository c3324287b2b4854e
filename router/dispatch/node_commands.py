"""Commands to a node's engine with an awaited result: load, unload or measure a model, clear its cache, count a prompt.

The commands run on the event loop of the dispatcher. A command is open from its frame until the node answers with
`Finished`, `Refusal` or `Failed` for its number. It also ends with the loss of the node, the end of this process, or
`COMMAND_TIMEOUT_SECONDS`. A load continues even if its caller is cancelled, because half a model in memory is useless.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from router.dispatch.request import RequestFailure
from wire.frames import (
    Admitted,
    Cancel,
    ClearCache,
    CountTokens,
    Failed,
    Finished,
    Frame,
    LoadModel,
    ProfileModel,
    Refusal,
    UnloadModel,
)
from wire.identity import NodeId
from wire.refusals import FailureCode, RefusalCode, Refused

MAX_OPEN_COMMANDS = 64
"""Maximum open commands about models, and separately maximum open token counts."""
MAX_COUNTS_PER_KEY = 16
"""Maximum open token counts of one API key, which leaves room for other keys within `MAX_OPEN_COMMANDS`."""
COMMAND_TIMEOUT_SECONDS = 3600.0
"""Timeout of a command in seconds, enough to load half a terabyte from a slow disk.

The node's agent detects a hanging engine much sooner.
"""
_DIED = frozenset({FailureCode.ENGINE_CRASHED, FailureCode.ENGINE_LOST})

CommandResult = Finished | Refused | RequestFailure
Kind = type[LoadModel] | type[UnloadModel] | type[ProfileModel] | type[ClearCache]
_DID: dict[type[Frame], str] = {
    LoadModel: "loaded",
    UnloadModel: "unloaded",
    ProfileModel: "measured",
    ClearCache: "cleared the cache of",
    CountTokens: "counted a prompt for",
}


@dataclass(frozen=True, slots=True)
class _OpenCommand:
    kind: type[Frame]
    node: NodeId
    name: str
    model: str
    ended: asyncio.Future[CommandResult]
    key: str = ""

    def end(self, ended: CommandResult) -> None:
        if not self.ended.done():
            self.ended.set_result(ended)

    @property
    def doing(self) -> str:
        """Text about the activity of the node, which follows the name of the node in a message."""
        return f"while it {_DID[self.kind]} {self.model or 'all models'}"


class NodeCommands:
    """Commands to nodes whose result is awaited.

    `send` writes a frame to a node's link and returns whether there is a link. `number` returns the next number of an
    attempt or command, which must be unique among both.
    """

    def __init__(self, send: Callable[[NodeId, Frame], bool], number: Callable[[], int]) -> None:
        self._send = send
        self._number = number
        self._open: dict[int, _OpenCommand] = {}
        self._closed = ""

    def __len__(self) -> int:
        return len(self._open)

    async def send(self, kind: Kind, node: NodeId, name: str, model: str) -> CommandResult:
        """Send a command about a model to a node, and wait for its result.

        `kind` is the class of the frame. `name` is the display name of the node, for messages. The result is a refusal
        if the node has no link or `MAX_OPEN_COMMANDS` commands are open. It is a failure if the node is lost, the
        command exceeds `COMMAND_TIMEOUT_SECONDS`, or this process ends. After a timeout or a cancellation of the
        caller, the node gets a cancel, which ends a measurement but not a load.
        """
        number = self._number()
        return await self._run_command(kind(number, model), number, node, name, model)

    async def count_tokens(self, node: NodeId, name: str, request: CountTokens) -> CommandResult:
        """Send a prompt to a node to have its tokens counted, and wait for the result.

        The request number of `request` is replaced. `name` is the display name of the node, for messages. The result is
        a refusal if the node has no link, or if the key has `MAX_COUNTS_PER_KEY` or all keys have `MAX_OPEN_COMMANDS`
        open counts. It is a failure if the node is lost, the command exceeds `COMMAND_TIMEOUT_SECONDS`, or this process
        ends. After a timeout or a cancellation of the caller, the node gets a cancel.
        """
        number, key = self._number(), request.weighted_key.name
        mine = sum(command.kind is CountTokens and command.key == key for command in self._open.values())
        if mine >= MAX_COUNTS_PER_KEY:
            text = f"{mine} token counts of this API key are open, which is the limit: wait for one to end"
            return Refused(RefusalCode.OVER_SHARE, text, None, 1.0)
        return await self._run_command(replace(request, request=number), number, node, name, request.model, key)

    async def _run_command(
        self, frame: Frame, number: int, node: NodeId, name: str, model: str, key: str = ""
    ) -> CommandResult:
        if self._closed:
            return RequestFailure(FailureCode.SHUTTING_DOWN, self._closed)
        command = _OpenCommand(type(frame), node, name, model, asyncio.get_running_loop().create_future(), key)
        same = sum((other.kind is CountTokens) == (command.kind is CountTokens) for other in self._open.values())
        if same >= MAX_OPEN_COMMANDS:
            kind = "token counts" if command.kind is CountTokens else "model commands"
            return Refused(
                RefusalCode.QUEUE_FULL, f"{MAX_OPEN_COMMANDS} {kind} are open, which is the limit: wait for one to end"
            )
        self._open[number] = command
        ended: CommandResult | None = None
        try:
            if not self._send(node, frame):
                ended = Refused(
                    RefusalCode.NOT_READY, f"{name} is not connected: retry when it is back", None, 2.0, name
                )
                return ended
            async with asyncio.timeout(COMMAND_TIMEOUT_SECONDS):
                ended = await command.ended
        except TimeoutError:
            return RequestFailure(
                FailureCode.COMMAND_TIMEOUT,
                f"{name} did not answer within {COMMAND_TIMEOUT_SECONDS:.0f} s {command.doing}: read its log "
                f"(`cluster logs {name}`)",
            )
        else:
            return ended
        finally:
            del self._open[number]
            if ended is None:
                self._send(node, Cancel(number))

    def receive(self, node: NodeId, frame: Admitted | Finished | Refusal | Failed) -> None:
        """Apply a frame from a node. Ignore `Admitted`, and a frame whose number has no open command on that node."""
        command = self._open.get(frame.request)
        if command is None or command.node != node:
            return
        if isinstance(frame, Finished):
            command.end(frame)
        elif isinstance(frame, Refusal):
            refused = frame.refused
            command.end(replace(refused, node=command.name, message=f"{command.name}: {refused.message}"))
        elif isinstance(frame, Failed):
            died = frame.code in _DIED
            cause = f"the engine of {command.name} died" if died else f"{command.name} failed"
            command.end(
                RequestFailure(
                    FailureCode.ENGINE_CRASHED if died else frame.code, f"{cause} {command.doing}: {frame.message}"
                )
            )

    def handle_lost_node(self, node: NodeId, reason: str) -> None:
        """End the commands on a lost node with a failure that names `reason`."""
        for command in self._open.values():
            if command.node == node:
                command.end(
                    RequestFailure(FailureCode.NODE_LOST, f"{command.name} was lost {command.doing} ({reason})")
                )

    def shutdown(self, message: str) -> None:
        """End all commands with the failure `message`. Later commands fail with the same message."""
        self._closed = message
        for command in self._open.values():
            command.end(RequestFailure(FailureCode.SHUTTING_DOWN, message))
