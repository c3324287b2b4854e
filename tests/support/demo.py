"""`make demo`: a coordinator and two nodes as separate processes, answers of a real model, the placement arithmetic.

The model is the one in the package. It was trained on a few dozen answers, which can be compared word for word.

The demo runs until Ctrl-C. With DEMO_ONCE=1 it checks the answer and exits with 0.
"""

import os
import queue
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from openai import DefaultHttpxClient, OpenAI

from tests import models
from tests.support.processes import NO_TLS, Pool, pool, until

NODES = 2
STREAMS = 12


def show(title: str, text: str) -> None:
    """Print one part of the demo."""
    print(
        f"\n\033[1m{title}\033[0m\n{text.rstrip()}" if sys.stdout.isatty() else f"\n{title}\n{text.rstrip()}",
        flush=True,
    )


def known() -> list[dict[str, str]]:
    """Return the answers that the model was trained on, the longest first."""
    answers = [one for one in models.answers() if "system" not in one and "reasoning" not in one]
    return sorted(answers, key=lambda one: -len(one["answer"]))


def loaded(node: dict[str, Any]) -> bool:
    """Return whether all models of a node are loaded."""
    return bool(node["models"]) and all(model["loaded"] for model in node["models"])


def stream(client: OpenAI, model: str, prompt: str) -> str:
    """Stream a chat to the screen; return its text."""
    print(f"\n$ ask {model}: {prompt}", flush=True)
    text = ""
    for chunk in client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": prompt}], stream=True
    ):
        piece = chunk.choices[0].delta.content or "" if chunk.choices else ""
        text += piece
        print(piece, end="", flush=True)
    print(flush=True)
    return text


def all_at_once(client: OpenAI, model: str, answers: list[dict[str, str]]) -> tuple[int, dict[str, int]]:
    """Send all questions at the same time; return the number of verbatim answers, and the number of answers per
    node."""

    def ask(one: dict[str, str]) -> tuple[bool, str]:
        raw = client.chat.completions.with_raw_response.create(
            model=model, messages=[{"role": "user", "content": one["prompt"]}]
        )
        return raw.parse().choices[0].message.content == one["answer"], raw.headers["x-macpool-node"]

    with ThreadPoolExecutor(len(answers)) as threads:
        results = list(threads.map(ask, answers))
    return sum(right for right, _ in results), Counter(node for _, node in results)


def without_power(demo: Pool, client: OpenAI, model: str, one: dict[str, str]) -> tuple[int, int, str]:
    """Stream one answer `STREAMS` times in parallel, and kill the node that sends the first token.

    Return the number of verbatim answers, the number of requests in flight on the killed node, and its name.
    """
    begun: queue.SimpleQueue[str] = queue.SimpleQueue()

    def ask() -> bool:
        raw = client.chat.completions.with_raw_response.create(
            model=model, messages=[{"role": "user", "content": one["prompt"]}], stream=True
        )
        text = ""
        for chunk in raw.parse():
            if not text:
                begun.put(raw.headers["x-macpool-node"])
            text += chunk.choices[0].delta.content or "" if chunk.choices else ""
        return text == one["answer"]

    with ThreadPoolExecutor(STREAMS) as threads:
        asked = [threads.submit(ask) for _ in range(STREAMS)]
        name = begun.get(timeout=60)
        writing = demo.node(name)["in_flight"]
        demo.nodes[name].kill()
        return sum(told.result() for told in asked), writing, name


def main() -> int:
    """Run the demo."""
    once = os.environ.get("DEMO_ONCE") == "1"
    with tempfile.TemporaryDirectory(prefix="macpool-demo-") as folder, pool(Path(folder)) as demo:
        demo.up()
        print(f"coordinator at {demo.facts['base_url']}", flush=True)
        for name in ("studio", "macbook"):
            demo.join(name, "engine.kind=mlx", "models.use_huggingface_cache=false", "models.preload=macpool-tiny")
        until(lambda: all(loaded(node) for node in demo.nodes_now()), 120, "the model on both")
        direct = DefaultHttpxClient(trust_env=False, verify=NO_TLS)
        client = OpenAI(base_url=demo.facts["base_url"], api_key=demo.key, http_client=direct)
        model = client.models.list().data[0].id
        first, *others = known()
        text = stream(client, model, first["prompt"])
        right, by_node = all_at_once(client, model, others)
        spread = ", ".join(f"{count} by {name}" for name, count in sorted(by_node.items()))
        show(f"{len(others)} questions at once", f"{right} answers word for word; {spread}")
        verbs = {
            "cluster nodes": ["nodes"],
            f"cluster place {model} --prompt-tokens 20000": ["place", model, "--prompt-tokens", "20000"],
        }
        for title, arguments in verbs.items():
            done = demo.run(*arguments, "--state", str(demo.state))
            show("$ " + title, done.stdout + done.stderr)
            if done.returncode:
                return done.returncode
        survived, writing, name = without_power(demo, client, model, first)
        show(
            f"{name} is killed while it generates {writing} of {STREAMS} answers",
            f"{survived} of {STREAMS} answers word for word: the other Mac resumed those of the killed one",
        )
        if survived != STREAMS:
            return 1
        if text != first["answer"] or right != len(others) or len(by_node) != NODES:
            print(
                "\nthe answers differ from those that the model was trained on, or did not come from both nodes",
                flush=True,
            )
            return 1
        if once:
            print("\nthe demo works", flush=True)
            return 0
        show(
            "still running",
            f"base URL {demo.facts['base_url']}\nAPI key  {demo.key}\nstate    {demo.state}\nCtrl-C stops it",
        )
        try:
            assert demo.coordinator is not None
            return demo.coordinator.popen.wait()
        except KeyboardInterrupt:
            return 0


if __name__ == "__main__":
    sys.exit(main())
