"""A node's video side as a process that a test can kill: it requests one lease and prints its events."""

import asyncio
import json
import sys
from pathlib import Path

import structlog

from tests.support.video.studio import Node


async def main(folder: str, settings: str, job: str) -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    node = await Node(Path(folder), json.loads(settings)).start()
    node.ask(job=json.loads(job))
    told = None
    while True:
        states = node.lender.list_states()
        phase = states[0].phase if states else ""
        if phase != told:
            told = phase
            print(json.dumps({"phase": phase, "worker": node.limiter.worker}), flush=True)
        await asyncio.sleep(0.05)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
