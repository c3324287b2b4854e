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
LOST, FAILED = 3, 4


class Broker:
    """See the module."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._tasks: set[asyncio.Task[None]] = set()

    def say(self, one: Spoken) -> None:
        """Tell the coordinator."""
        self._writer.write(said(one))

    async def hear(self, reader: asyncio.StreamReader) -> None:
        """Do what is said until the end."""
        ear = Ear(ToBroker)
        while data := await reader.read(65536):
            for one in ear.feed(data):
                if isinstance(one, Connect):
                    await _connect(one)
                    self.say(Up())
                else:
                    self._spawn(one)

    def _spawn(self, one: Create | Kill) -> None:
        task = asyncio.create_task(self._create(one) if isinstance(one, Create) else self._kill(one.lease))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _create(self, wanted: Create) -> None:
        try:
            async with asyncio.timeout(wanted.seconds):
                await _made(wanted)
        except TimeoutError:
            await self._kill(wanted.lease)
            self.say(NotCreated(wanted.lease, f"Ray started no actor within {wanted.seconds:.0f} s"))
        except Exception as error:  # whatever Ray or the actor's own start raises means the same: it is not there
            await self._kill(wanted.lease)
            self.say(NotCreated(wanted.lease, f"{type(error).__name__}: {str(error).strip()[:400]}"))
        else:
            self.say(Created(wanted.lease))

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


async def _run(descriptor: int) -> int:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor))
    try:
        await Broker(writer).hear(reader)
    except Exception as error:  # any reason at all: the coordinator starts another one
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return FAILED
    return LOST


def main() -> None:
    """Run; `python -m coordinator.video.broker DESCRIPTOR`. Ends at once: Ray's own end may take its time."""
    os._exit(asyncio.run(_run(int(sys.argv[1]))))


if __name__ == "__main__":
    main()
