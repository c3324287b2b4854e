"""Driver of this Mac's Ray: the only process of the node that connects to Ray.

The agent runs the driver as `python -m node.video.ray.driver DESCRIPTOR`, with one end of a socket pair. The driver is
a process of its own because Ray ends a driver that has lost its cluster. Its actors are detached: they outlive the
driver, and the next driver finds them by the id of their lease. The driver only starts and ends actors; the agent
follows a job through the files of its lease.

The process ends within a second of the end of its socket. Its working folder is empty, because Ray puts that folder
first on the import path of its workers.
"""

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import ray as untyped

from node.video.ray.driver_link import (
    ActorCreated,
    ActorNotCreated,
    ConnectDriver,
    CreateActor,
    DriverConnected,
    DriverMessage,
    KillActor,
    MessageReader,
    ToDriver,
    encode_message,
)
from node.video.worker.actor import WorkerHost

ray: Any = untyped
NAMESPACE = "macpool"
"""Namespace of the actors in Ray."""
RESOURCE = "video_lease_gib"
"""Name of Ray's resource for leases, in GiB."""
CONNECT_TIMEOUT_SECONDS = 45.0
"""Maximum seconds to connect to Ray. After that the driver exits with `FAILED`."""
CLOSED, FAILED = 3, 4
"""Exit codes: `CLOSED` after the agent closed the socket, `FAILED` after any error, such as an error of Ray."""


class Driver:
    """Server that creates and ends Ray actors for the agent, and answers over `writer`.

    Tests replace the calls of Ray by `create` and `kill`; None selects Ray. `create(message)` returns once the actor of
    the lease has started, `kill(lease)` once the lease has no actor.
    """

    def __init__(
        self,
        writer: asyncio.StreamWriter,
        create: Callable[[CreateActor], Coroutine[Any, Any, None]] | None = None,
        kill: Callable[[str], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        self._writer = writer
        self._start = create or _create_ray_actor
        self._kill = kill or _kill_ray_actor
        self._tasks: set[asyncio.Task[None]] = set()
        self._creating: dict[str, asyncio.Task[None]] = {}

    @property
    def creating(self) -> frozenset[str]:
        """Ids of the leases whose actor is being started."""
        return frozenset(self._creating)

    def send(self, message: DriverMessage) -> None:
        """Send a message to the agent."""
        self._writer.write(encode_message(message))

    async def serve(self, stream: asyncio.StreamReader) -> None:
        """Handle messages of the agent until the socket ends.

        Raise any error of the connection to Ray, and `DriverLinkError` for an invalid message.
        """
        connecting: asyncio.Task[None] | None = None
        messages = MessageReader(ToDriver)
        reading = asyncio.create_task(stream.read(65536))
        while True:
            waited = {reading} if connecting is None else {reading, connecting}
            done, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if connecting is not None and connecting in done:
                connecting.result()
                connecting = None
            if reading not in done:
                continue
            data, reading = reading.result(), asyncio.create_task(stream.read(65536))
            if not data:
                return
            for message in messages.feed(data):
                if isinstance(message, ConnectDriver):
                    connecting = asyncio.create_task(self._connect(message))
                else:
                    self._start_task(message)

    async def _connect(self, message: ConnectDriver) -> None:
        await _connect_to_ray(message)
        self.send(DriverConnected())

    def _start_task(self, message: CreateActor | KillActor) -> None:
        if isinstance(message, KillActor):
            creating = self._creating.pop(message.lease, None)
            if creating is not None:
                creating.cancel()
        task = asyncio.create_task(
            self._create_actor(message) if isinstance(message, CreateActor) else self._kill(message.lease)
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if isinstance(message, CreateActor):
            self._creating[message.lease] = task
            task.add_done_callback(lambda _: self._creating.pop(message.lease, None))

    async def _create_actor(self, wanted: CreateActor) -> None:
        try:
            async with asyncio.timeout(wanted.seconds):
                await self._start(wanted)
        except TimeoutError:
            await self._kill(wanted.lease)
            self.send(ActorNotCreated(wanted.lease, f"Ray started no actor within {wanted.seconds:.0f} s"))
        except Exception as error:  # any error of Ray, or of the start of the actor, has the same meaning: no actor
            await self._kill(wanted.lease)
            self.send(ActorNotCreated(wanted.lease, f"{type(error).__name__}: {str(error).strip()[:400]}"))
        else:
            self.send(ActorCreated(wanted.lease))


async def _connect_to_ray(wanted: ConnectDriver) -> None:
    host = wanted.address.rpartition(":")[0]

    def connect_driver() -> None:
        ray.init(
            address=wanted.address,
            namespace=NAMESPACE,
            _node_ip_address=host,
            log_to_driver=False,
            configure_logging=False,
            include_dashboard=False,
        )

    async with asyncio.timeout(CONNECT_TIMEOUT_SECONDS):
        await asyncio.to_thread(connect_driver)


async def _create_ray_actor(wanted: CreateActor) -> None:
    kind: Any = ray.remote(WorkerHost)
    actor = kind.options(
        name=wanted.lease,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        resources={RESOURCE: wanted.gib},
        max_restarts=0,
        max_task_retries=0,
        max_concurrency=4,
    ).remote(wanted.folder, wanted.lease, wanted.generation)
    await actor.get_node_id.remote()


async def _kill_ray_actor(lease: str) -> None:
    with contextlib.suppress(ValueError):  # there is none of this name
        actor: Any = await asyncio.to_thread(ray.get_actor, lease, NAMESPACE)
        await asyncio.to_thread(ray.kill, actor)


async def _serve_socket(descriptor: int) -> None:
    """Serve the agent, then exit without a shutdown of Ray, which may take seconds."""
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor))
    try:
        await Driver(writer).serve(reader)
    except Exception as error:  # of any kind: the agent starts another driver
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(FAILED)
    os._exit(CLOSED)


def main() -> None:
    """Serve the agent on the socket whose descriptor is the argument of the command line.

    End the process with the exit code `CLOSED` or `FAILED`.
    """
    asyncio.run(_serve_socket(int(sys.argv[1])))


if __name__ == "__main__":
    main()
