"""Commands that end after their response, for clients that must not wait for minutes, such as the page.

A browser opens at most six connections to a host. On `deferrable` routes (`route.Route`), a command with `Prefer:
respond-async` (RFC 7240) is therefore answered with 202 at its start. The answer is 429 while `MAX_RUNNING` such
commands run. The section `commands` of `/api/v1/live` reports the end of a command.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import wraps
from typing import Any

import msgspec
import structlog
from fastapi import Request
from fastapi.responses import Response

from coordinator.api.errors import ProblemError
from coordinator.state.store_errors import StoreError
from router.errors import Problem

MAX_RUNNING = 64
"""Maximum deferred commands that have not ended. A further one is refused with 429."""
MAX_ENDED = 50
"""Maximum ended commands that are listed; the oldest above it are deleted."""
LISTED_SECONDS = 600.0
"""Maximum seconds for which an ended command is listed."""
RESPOND_ASYNC = "respond-async"
PREFERS_ASYNC: ContextVar[bool] = ContextVar("prefers_async", default=False)
"""Whether the current request prefers a response before the end of its command."""

log = structlog.get_logger("coordinator.api.deferred_commands")


class CommandStage(StrEnum):
    """Stage of a deferred command."""

    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeferredCommand:
    """Command that was answered with 202. Times are in Unix seconds."""

    id: str
    name: str
    """Name of the route's handler, as in the audit log."""
    model: str
    node: str | None
    """Node, as the request named it; None if the coordinator chooses it."""
    started: float
    ended: float | None = None
    """Unix time in seconds of the end; None while the command runs."""
    stage: CommandStage = CommandStage.RUNNING
    message: str = ""
    """Reason of a failure, for a person; empty unless the command failed."""
    answer: Mapping[str, Any] | None = None
    """Answer of the route's handler; None unless the command is completed."""

    def to_row(self) -> dict[str, object]:
        """Return the command as a row of the API."""
        return {
            "id": self.id,
            "name": self.name,
            "model": self.model,
            "node": self.node,
            "state": str(self.stage),
            "message": self.message,
            "answer": self.answer,
            "started": self.started,
            "ended": self.ended,
        }


def has_async_preference(request: Request) -> bool:
    """Return whether a request has the preference `respond-async` in a header `Prefer`."""
    preferences = (part.partition(";")[0] for value in request.headers.getlist("prefer") for part in value.split(","))
    return any(preference.strip().lower() == RESPOND_ASYNC for preference in preferences)


class DeferredCommands:
    """Running deferred commands, and ended ones that are still listed. `wall` returns Unix seconds."""

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._commands: dict[str, DeferredCommand] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def build_rows(self) -> list[dict[str, object]]:
        """Return the rows of all listed commands, ordered by their last start or end, the latest first.

        Ended commands above `MAX_ENDED` or older than `LISTED_SECONDS` are deleted first.
        """
        self._delete_old()
        return [command.to_row() for command in reversed(self._commands.values())]

    def wrap(self, act: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a route handler whose body has a model and a node, so that its command can end after the response.

        If the request prefers `respond-async`, the wrapped handler starts the command and returns a 202 response with
        its row. It raises `ProblemError` (429) if `MAX_RUNNING` commands are running. For any other request, it waits
        for the command and returns its answer.
        """

        @wraps(act)
        async def start(**arguments: Any) -> Any:
            if not PREFERS_ASYNC.get():
                return await act(**arguments)
            body = msgspec.json.encode({"schema": 1, "command": self._start(act, arguments).to_row()})
            return Response(body, 202, {"preference-applied": RESPOND_ASYNC}, "application/json")

        return start

    def _start(self, act: Callable[..., Any], arguments: Mapping[str, Any]) -> DeferredCommand:
        self._delete_old()
        if sum(command.ended is None for command in self._commands.values()) >= MAX_RUNNING:
            text = f"{MAX_RUNNING} commands run, which is the limit: wait for one to end"
            raise ProblemError(Problem(429, "too_many_commands", text))
        body = arguments["body"]
        name = f"command-{secrets.token_hex(6)}"
        command = DeferredCommand(id=name, name=act.__name__, model=body.model, node=body.node, started=self._wall())
        self._commands[name] = command
        task = asyncio.create_task(self._run(command, act, arguments))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return command

    async def _run(self, command: DeferredCommand, act: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        stage, message, answer = CommandStage.FAILED, "", None
        try:
            answer = await act(**arguments)
            stage = CommandStage.COMPLETED
        except (ProblemError, StoreError) as error:
            message = str(error)
        except Exception:  # the page must show an end, also of an error of this program
            log.exception("command failed", command=command.name, model=command.model)
            message = "internal error of the coordinator: look at `cluster logs`"
        ended = replace(command, stage=stage, message=message, answer=answer, ended=self._wall())
        del self._commands[command.id]
        self._commands[command.id] = ended

    def _delete_old(self) -> None:
        ended = [command for command in self._commands.values() if command.ended is not None]
        newest, oldest = {command.id for command in ended[-MAX_ENDED:]}, self._wall() - LISTED_SECONDS
        for command in ended:
            if command.id not in newest or (command.ended or 0.0) < oldest:
                del self._commands[command.id]
