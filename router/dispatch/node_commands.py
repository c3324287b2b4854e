"""Commands to a node's engine with an awaited result: load, unload or measure a model, count a prompt.

The commands run next to the dispatcher, on its event loop. A command is open from its frame until the node's Finished,
Refusal or Failed for its number. It also ends with the loss of the node, the end of this process, or
COMMAND_TIMEOUT_SECONDS. The caller gets the result exactly once. A load continues after its caller has left, because
half a model in memory is useless.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from router.dispatch.request import RequestFailure
from wire.frames import (
    Admitted,
    Cancel,
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
"""Maximum open commands about models, and maximum open counts."""
MAX_COUNTS_PER_KEY = 16
"""Maximum open counts of one API key: the rest is for other keys."""
COMMAND_TIMEOUT_SECONDS = 3600.0
"""Timeout in seconds: half a terabyte from a slow disk. The node's agent detects a hanging engine long before."""
_DIED = frozenset({FailureCode.ENGINE_CRASHED, FailureCode.ENGINE_LOST})

Ended = Finished | Refused | RequestFailure
Kind = type[LoadModel] | type[UnloadModel] | type[ProfileModel]
_DID: dict[type[Frame], str] = {
    LoadModel: "loaded",
    UnloadModel: "unloaded",
    ProfileModel: "measured",
    CountTokens: "counted a prompt for",
}


@dataclass(frozen=True, slots=True)
class _OpenCommand:
    kind: type[Frame]
    node: NodeId
    name: str
    model: str
    ended: asyncio.Future[Ended]
    key: str = ""

    def end(self, ended: Ended) -> None:
        if not self.ended.done():
            self.ended.set_result(ended)

    @property
    def doing(self) -> str:
        """Text for the node's activity, to follow its name."""
        return f"while it {_DID[self.kind]} {self.model}"


class NodeCommands:
    """Commands to nodes whose result is awaited.

    `send` writes a frame to a node's link and returns whether there is a link. `number` returns the next request
    number, from the source of all request numbers.
    """

    def __init__(self, send: Callable[[NodeId, Frame], bool], number: Callable[[], int]) -> None:
        self._send = send
        self._number = number
        self._open: dict[int, _OpenCommand] = {}
        self._closed = ""

    def __len__(self) -> int:
        return len(self._open)

    async def send(self, kind: Kind, node: NodeId, name: str, model: str) -> Ended:
        """Send a command about a model to a node and wait for its result. `name` is the node's display name.

        Without a link, or with too many open commands, the result is a refusal.
        """
        number = self._number()
        return await self._carried(kind(number, model), number, node, name, model)

    async def count(self, node: NodeId, name: str, request: CountTokens) -> Ended:
        """Send a prompt to a node for counting and wait for the result. The request number of `request` is replaced.

        Without a link, or with too many open counts of the key or of all keys, the result is a refusal.
        """
        number, key = self._number(), request.owner.name
        mine = sum(one.kind is CountTokens and one.key == key for one in self._open.values())
        if mine >= MAX_COUNTS_PER_KEY:
            text = f"{mine} token counts of this API key are open, which is the limit: wait for one to end"
            return Refused(RefusalCode.OVER_SHARE, text, None, 1.0)
        return await self._carried(replace(request, request=number), number, node, name, request.model, key)

    async def _carried(self, frame: Frame, number: int, node: NodeId, name: str, model: str, key: str = "") -> Ended:
        if self._closed:
            return RequestFailure(FailureCode.SHUTTING_DOWN, self._closed)
        order = _OpenCommand(type(frame), node, name, model, asyncio.get_running_loop().create_future(), key)
        same = sum((one.kind is CountTokens) == (order.kind is CountTokens) for one in self._open.values())
        if same >= MAX_OPEN_COMMANDS:
            what = "token counts" if order.kind is CountTokens else "model commands"
            return Refused(
                RefusalCode.QUEUE_FULL, f"{MAX_OPEN_COMMANDS} {what} are open, which is the limit: wait for one to end"
            )
        self._open[number] = order
        ended: Ended | None = None
        try:
            if not self._send(node, frame):
                ended = Refused(
                    RefusalCode.NOT_READY, f"{name} is not connected: retry when it is back", None, 2.0, name
                )
                return ended
            async with asyncio.timeout(COMMAND_TIMEOUT_SECONDS):
                ended = await order.ended
        except TimeoutError:
            return RequestFailure(
                FailureCode.COMMAND_TIMEOUT,
                f"{name} sent nothing for {COMMAND_TIMEOUT_SECONDS:.0f} s {order.doing}",
            )
        else:
            return ended
        finally:
            del self._open[number]
            if ended is None:
                self._send(node, Cancel(number))

    def receive(self, node: NodeId, frame: Admitted | Finished | Refusal | Failed) -> None:
        """Apply a frame of a node; a frame without an open command on that node is ignored."""
        order = self._open.get(frame.request)
        if order is None or order.node != node:
            return
        if isinstance(frame, Finished):
            order.end(frame)
        elif isinstance(frame, Refusal):
            refused = frame.refused
            order.end(replace(refused, node=order.name, message=f"{order.name}: {refused.message}"))
        elif isinstance(frame, Failed):
            died = frame.code in _DIED
            what = f"the engine of {order.name} died" if died else f"{order.name} failed"
            order.end(
                RequestFailure(
                    FailureCode.ENGINE_CRASHED if died else frame.code, f"{what} {order.doing}: {frame.message}"
                )
            )

    def node_gone(self, node: NodeId, reason: str) -> None:
        """End the commands of a lost node with a failure that names `reason`."""
        for order in self._open.values():
            if order.node == node:
                order.end(RequestFailure(FailureCode.NODE_LOST, f"{order.name} was lost {order.doing} ({reason})"))

    def shutdown(self, message: str) -> None:
        """End all commands with a failure, whose text is `message`, and accept no more."""
        self._closed = message
        for order in self._open.values():
            order.end(RequestFailure(FailureCode.SHUTTING_DOWN, message))
