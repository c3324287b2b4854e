"""`make clients`: runs real clients against a real pool, and writes down what they say.

Each client is installed from the package registries into a folder of its own below .cache/clients. What is written down
(`recorded/`) is what they say without their words: prompts, descriptions and ids are replaced, names and shapes stay.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from tests.clients.catalogue import CLIENTS, Client
from tests.clients.recorder import Recorder, recording
from tests.support.engine_pool import MLX
from tests.support.processes import ROOT, Pool, environment, pool

FOLDER = ROOT / ".cache" / "clients"
RECORDED = Path(__file__).parent / "recorded"
WORDS = {"text", "content", "description", "system", "input", "title"}
"""Where clients say something of their own."""
KEPT = {"Hello!", ""}
HEADERS = ("accept", "content-type", "user-agent", "anthropic-version", "anthropic-beta", "x-stainless-lang")
SECONDS = 300


def install(client: Client) -> None:
    """Install a client, once."""
    place = FOLDER / client.name
    if place.exists():
        return
    place.mkdir(parents=True)
    uv = shutil.which("uv") or str(ROOT / ".uv" / "bin" / "uv")
    try:
        if client.pip:
            subprocess.run([uv, "venv", "--quiet", "--clear", place], check=True)
            python = place / "bin" / "python"
            subprocess.run([uv, "pip", "install", "--quiet", "--python", python, *client.pip], check=True)
        if client.npm:
            subprocess.run(
                ["npm", "install", "--silent", "--no-audit", "--no-fund", *client.npm], cwd=place, check=True
            )
    except (OSError, subprocess.CalledProcessError):
        shutil.rmtree(place)
        raise


def run(client: Client, made: Pool, recorder: Recorder, home: Path) -> tuple[int, str]:
    """Run a client once, and end what it leaves behind; give its exit code and the last line that it said."""
    meant = {"base": recorder.url, "key": made.key, "folder": str(FOLDER), "home": str(home), "name": client.name}

    def filled(text: str) -> str:
        for name, value in meant.items():
            text = text.replace("{" + name + "}", value)
        return text

    for name, text in client.files.items():
        (home / name).write_text(filled(text))
    if client.npm:  # a program is found beside its libraries
        (home / "node_modules").symlink_to(FOLDER / client.name / "node_modules")
    known = {name: value for name, value in environment().items() if name not in ("PYTHONPATH", "LD_PRELOAD")}
    known |= {
        "HOME": str(home), "OPENAI_API_KEY": made.key, "OPENAI_BASE_URL": f"{recorder.url}/v1",
        "OPENAI_API_BASE": f"{recorder.url}/v1", "ANTHROPIC_BASE_URL": recorder.url, "MACPOOL_BASE": recorder.url,
        "ANTHROPIC_API_KEY": made.key,
    }  # fmt: skip
    if "ANTHROPIC_AUTH_TOKEN" in client.variables:
        del known["ANTHROPIC_API_KEY"]
    known |= {name: filled(value) for name, value in client.variables.items()}
    command = [filled(word) for word in client.command]
    said = home / "said"
    with said.open("w") as output:
        running = subprocess.Popen(
            command, cwd=home, env=known, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            code = running.wait(SECONDS)
        except subprocess.TimeoutExpired:
            code = -1
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()
    return code, (said.read_text().strip().splitlines() or [""])[-1]


def without_words(value: Any, key: str = "") -> Any:
    """Take out what a client says, and who said it."""
    if isinstance(value, dict):
        return {name: without_words(one, name) for name, one in cast(dict[str, Any], value).items()}
    if isinstance(value, list):
        return [without_words(one, key) for one in cast(list[Any], value)]
    if isinstance(value, str) and key == "user_id":
        return "somebody"
    if isinstance(value, str) and key in WORDS and value not in KEPT:
        return ("word " * 12)[: max(1, min(len(value), 60))].strip()
    return value


def tidied(exchanges: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Give the exchanges that differ, as they are written down."""
    seen: set[str] = set()
    for one in exchanges:
        headers = cast(Mapping[str, str], one["headers"])
        kept = {name: headers[name] for name in HEADERS if name in headers}
        told = without_words({**one, "headers": kept})
        kind = json.dumps([told["method"], told["path"], sorted(told.get("body", {}))])
        if kind not in seen:
            seen.add(kind)
            yield told


@contextmanager
def _pool() -> Iterator[Pool]:
    with tempfile.TemporaryDirectory(prefix="mp-") as folder, pool(Path(folder)) as made:
        made.up("router.queue_seconds=60")
        made.join("mini", *MLX)
        yield made


def main() -> int:
    """Run all clients that can be run, or those that are named."""
    wanted, bad = set(sys.argv[1:]), 0
    RECORDED.mkdir(exist_ok=True)
    with _pool() as made:
        for client in CLIENTS:
            if not client.command or (wanted and client.name not in wanted):
                continue
            install(client)
            with tempfile.TemporaryDirectory(prefix="mp-") as home, recording(made.base) as recorder:
                code, said = run(client, made, recorder, Path(home))
            answered = bool(recorder.exchanges) and all(one["status"] < 400 for one in recorder.exchanges)
            good = code == 0 and answered
            print(f"{'ok ' if good else 'BAD'} {client.name}: {len(recorder.exchanges)} requests; {said}")
            if good:
                text = json.dumps(list(tidied(recorder.exchanges)), indent=1, ensure_ascii=False)
                (RECORDED / f"{client.name}.json").write_text(text + "\n")
            bad += not good
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
