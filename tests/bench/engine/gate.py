"""CPU time of one check of the gate on a real engine: `python -m tests.bench.engine.gate MODEL ROWS`.

Prints `{"microseconds": [...]}` of this thread's CPU, one figure a round. As before every chunk of a prompt, the engine
reads its footprint and MLX's memory, adds up its commitments, decides and answers.
"""

import json
import sys
import time
from pathlib import Path
from random import Random

from node.engine.memory.gate import GateSite
from tests.bench.engine.chats import words
from tests.support.engine.text_engine import Driver
from wire.frames import GenerationParams

ROUNDS, CHECKS = 9, 2000


def main() -> None:
    """Start decoding all rows, then check repeatedly."""
    folder, rows = Path(sys.argv[1]), int(sys.argv[2])
    driver = Driver(folder, preload=(folder.name,))
    random = Random(1)
    asked = [driver.ask(words(random, 100), GenerationParams(temperature=0.0, max_tokens=400)) for _ in range(rows)]
    driver.until(lambda: driver.engine.report(time.monotonic()).running == rows)
    figures: list[float] = []
    for _ in range(ROUNDS):
        driver.turn()
        begun = time.thread_time()
        for _ in range(CHECKS):
            assert driver.engine.parts.forwards.check(GateSite.PREFILL, 4096) is None
        figures.append((time.thread_time() - begun) / CHECKS * 1e6)
    assert not any(driver.ended(number) for number in asked)
    print(json.dumps({"microseconds": figures}))


if __name__ == "__main__":
    main()
