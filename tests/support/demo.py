"""`make demo`: a coordinator and two nodes as separate processes, a streamed chat, and the placement arithmetic.

Stays up until Ctrl-C; with DEMO_ONCE=1 it checks the answer and exits 0.
"""

import os
import sys
import tempfile
from pathlib import Path

import httpx
from openai import OpenAI

from tests.support.processes import Pool, pool


def show(title: str, text: str) -> None:
    """Print one part of the demo."""
    print(
        f"\n\033[1m{title}\033[0m\n{text.rstrip()}" if sys.stdout.isatty() else f"\n{title}\n{text.rstrip()}",
        flush=True,
    )


def chat(demo: Pool) -> str:
    """Stream a chat through the openai library; give its text."""
    direct = httpx.Client(trust_env=False)
    client = OpenAI(base_url=demo.facts["base_url"], api_key=demo.key, http_client=direct)
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is a pool of Macs good for?"}],
        stream=True,
        max_tokens=24,
    )
    print(f"\n$ ask {model}", flush=True)
    text = ""
    for chunk in stream:
        piece = chunk.choices[0].delta.content or "" if chunk.choices else ""
        text += piece
        print(piece, end="", flush=True)
    print(flush=True)
    return text


def main() -> int:
    """Run the demo."""
    once = os.environ.get("DEMO_ONCE") == "1"
    with tempfile.TemporaryDirectory(prefix="macpool-demo-") as folder, pool(Path(folder)) as demo:
        demo.up()
        print(f"coordinator at {demo.facts['base_url']}", flush=True)
        demo.join("studio", "engine.scripted.memory=128GiB")
        demo.join("macbook", "engine.scripted.memory=36GiB")
        text = chat(demo)
        verbs = {"cluster nodes": ["nodes"], "cluster place scripted-1 --prompt-tokens 20000": [
            "place", "scripted-1", "--prompt-tokens", "20000"]}  # fmt: skip
        for title, arguments in verbs.items():
            done = demo.run(*arguments, "--state", str(demo.state))
            show("$ " + title, done.stdout + done.stderr)
            if done.returncode:
                return done.returncode
        if len(text.split()) != 24:
            print(f"the answer has {len(text.split())} words instead of 24")
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
