"""The peer of `decode`: mlx-lm's own `BatchGenerator` in a process of its own, without a server.

`python -m tests.bench.engine.library MODEL` prints a line once the model is loaded. Each line of its standard input is
`{"prompts": [text, …], "tokens": N}`. Its answer has the monotonic times at which each row got its tokens.
"""

import json
import sys
import time
from pathlib import Path

from mlx_lm.generate import BatchGenerator
from mlx_lm.utils import load_model, load_tokenizer


def main() -> None:
    """Serve until the input ends."""
    folder = Path(sys.argv[1])
    model, _ = load_model(folder)
    tokenizer = load_tokenizer(folder)
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        messages = [[{"role": "user", "content": prompt}] for prompt in asked["prompts"]]
        ids = [tokenizer.apply_chat_template(one, add_generation_prompt=True) for one in messages]
        print(json.dumps(generate(model, ids, asked["tokens"])), flush=True)


def generate(model: object, ids: list[list[int]], tokens: int) -> list[list[float]]:
    """Decode all prompts as one batch, greedily; return the times of each row."""
    generator = BatchGenerator(model)
    times: dict[int, list[float]] = {number: [] for number in generator.insert(ids, [tokens] * len(ids))}
    while responses := generator.next_generated():
        now = time.monotonic()
        for one in responses:
            times[one.uid].append(now)
    generator.close()
    return list(times.values())


if __name__ == "__main__":
    main()
