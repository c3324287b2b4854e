"""The broker: the only process that drives Ray. Started by the coordinator as `python -m coordinator.video.broker`.

Ray ends its driver when the head is gone for a minute, so the driver is a process of its own, which may die at any
time: its actors are detached and go on, and the next broker finds them by the name of their lease. It asks Ray for
nothing but actors: where a job stands is heard from its node.

It hears and speaks over the socket that it inherits, and ends within a second of its end. It stands in a folder where
nothing can be imported from, because Ray puts that first on its workers' paths.
"""

import asyncio
import contextlib
import importlib
import os
import socket
import sys
from typing import Any

import ray as untyped
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from coordinator.video.spoken import Connect, Create, Created, Ear, Kill, NotCreated, Spoken, ToBroker, Up, said

ray: Any = untyped
NAMESPACE = "macpool"
ACTOR = "node.video.actor", "Host"
"""What is started on the node, by name: it is the node's, and nothing of a node is imported into the coordinator."""
RESOURCE = "video_lease_gib"
CONNECT_SECONDS = 45.0
ATTEMPT_SECONDS = 45.0
"""One attempt to start an actor: what a head that was killed was about to start is never heard of again."""
AGAIN = 1.0
LOST, FAILED = 3, 4


class Broker:
    """See the module."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._tasks: set[asyncio.Task[None]] = set()
        self._creating: dict[str, asyncio.Task[None]] = {}

    def say(self, one: Spoken) -> None:
        """Tell the coordinator."""
        self._writer.write(said(one))

    async def hear(self, reader: asyncio.StreamReader) -> None:
        """Do what is said until the end. Raises what went wrong with Ray itself."""
        connecting: asyncio.Task[None] | None = None
        ear = Ear(ToBroker)
        reading = asyncio.create_task(reader.read(65536))
        while True:
            waited = {reading} if connecting is None else {reading, connecting}
            done, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if connecting is not None and connecting in done:
                connecting.result()
                connecting = None
            if reading not in done:
                continue
            data, reading = reading.result(), asyncio.create_task(reader.read(65536))
            if not data:
                return
            for one in ear.feed(data):
                if isinstance(one, Connect):
                    connecting = asyncio.create_task(self._connect(one))
                else:
                    self._spawn(one)

    async def _connect(self, wanted: Connect) -> None:
        await _connect(wanted)
        self.say(Up())

    def _spawn(self, one: Create | Kill) -> None:
        if isinstance(one, Kill):
            creating = self._creating.pop(one.lease, None)
            if creating is not None:
                creating.cancel()
        task = asyncio.create_task(self._create(one) if isinstance(one, Create) else self._kill(one.lease))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if isinstance(one, Create):
            self._creating[one.lease] = task
            task.add_done_callback(lambda _: self._creating.pop(one.lease, None))

    async def _create(self, wanted: Create) -> None:
        failure = "Ray started no actor"
        try:
            async with asyncio.timeout(wanted.seconds):
                while failure := await self._attempt(wanted):  # noqa: ASYNC110  Ray has no event for it
                    await asyncio.sleep(AGAIN)
        except TimeoutError:
            await self._kill(wanted.lease)
            self.say(NotCreated(wanted.lease, f"{failure} within {wanted.seconds:.0f} s"))
        except Exception as error:  # whatever Ray or the actor's own start raises means the same: it is not there
            await self._kill(wanted.lease)
            self.say(NotCreated(wanted.lease, f"{type(error).__name__}: {str(error).strip()[:400]}"))
        else:
            self.say(Created(wanted.lease))

    async def _attempt(self, wanted: Create) -> str:
        """Try once; say why it may be tried again, nothing when the actor is up. What else is wrong is raised."""
        try:
            async with asyncio.timeout(ATTEMPT_SECONDS):
                await _made(wanted)
        except TimeoutError:
            await self._kill(wanted.lease)
            return "Ray started no actor"
        except ray.exceptions.ActorUnschedulableError:  # a head that was started again has not heard of its nodes yet
            await self._kill(wanted.lease)
            return "Ray knew no such node"
        return ""

    async def _kill(self, lease: str) -> None:
        with contextlib.suppress(ValueError):  # there is none of this name
            actor: Any = await asyncio.to_thread(ray.get_actor, lease, NAMESPACE)
            await asyncio.to_thread(ray.kill, actor)


async def _connect(wanted: Connect) -> None:
    def init() -> None:
        ray.init(
            address=wanted.address, namespace=NAMESPACE, _node_ip_address=wanted.host, log_to_driver=False,
            configure_logging=False, include_dashboard=False,
        )  # fmt: skip

    async with asyncio.timeout(CONNECT_SECONDS):
        await asyncio.to_thread(init)


async def _made(wanted: Create) -> None:
    module, name = ACTOR
    kind: Any = ray.remote(getattr(importlib.import_module(module), name))
    actor = kind.options(
        name=wanted.lease, namespace=NAMESPACE, lifetime="detached", get_if_exists=True, num_cpus=0,
        resources={RESOURCE: wanted.gib}, max_restarts=0, max_task_retries=0, max_concurrency=4,
        scheduling_strategy=NodeAffinitySchedulingStrategy(wanted.ray, soft=False),
    ).remote(wanted.folder, wanted.lease, wanted.generation)  # fmt: skip
    await actor.begun.remote()


async def _run(descriptor: int) -> None:
    """Do what is said, and leave at once: Ray's own end, or beginning, may take its time."""
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor))
    try:
        await Broker(writer).hear(reader)
    except Exception as error:  # any reason at all: the coordinator starts another one
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(FAILED)
    os._exit(LOST)


def main() -> None:
    """Run; `python -m coordinator.video.broker DESCRIPTOR`."""
    asyncio.run(_run(int(sys.argv[1])))


if __name__ == "__main__":
    main()
