"""`make clients`: run real clients against a real pool over HTTPS, and record their requests.

Each client gets the variables of `cluster env` and no other data of the pool. Of the variables for the authority it
gets only its own (`Client.trust`), because docs/clients.md must name the right one. Each client is installed from the
package registries into a folder of its own below .cache/clients. The recordings (`recorded/`) are the requests without
private text: prompts, descriptions and ids are replaced, names and shapes stay.
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

from coordinator.cli.commands.clients.trust_ca import write_bundle
from coordinator.cli.commands.use import BUNDLE_VARIABLES
from tests.clients.catalogue import CLIENTS, OTHERS, Client
from tests.clients.recorder import Recorder, recording
from tests.support.cluster.engine_pool import MLX
from tests.support.processes import ROOT, Pool, environment, pool

FOLDER = ROOT / ".cache" / "clients"
RECORDED = Path(__file__).parent / "recorded"
WORDS = {"text", "content", "description", "system", "input", "title"}
"""Fields with texts of the client."""
KEPT = {"Hello!", ""}
IDS = {"user_id", "id", "prompt_cache_key", "definition"}
"""Keys whose values name a person, a conversation or a part of it, and grammars, which are as long as texts."""
HEADERS = ("accept", "content-type", "user-agent", "anthropic-version", "anthropic-beta", "x-stainless-lang")
SECONDS = 300


def install(client: Client) -> None:
    """Install a client, once. Raise OSError or CalledProcessError, and remove the client's folder, if that fails."""
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


def variables(client: Client, made: Pool, recorder: Recorder) -> dict[str, str]:
    """Return the variables of `cluster env`, with the recorder's URL and only the client's variable for the
    authority."""
    key_file = made.folder / "key"
    key_file.write_text(made.key)
    printed = made.cli("env", "--key-file", str(key_file))
    kept = {name: value for name, value in printed.items() if name not in BUNDLE_VARIABLES or name == client.trust}
    return {name: str(value).replace(made.base, recorder.url) for name, value in kept.items() if name != "schema"}


def run(client: Client, made: Pool, recorder: Recorder, home: Path) -> tuple[int, str]:
    """Run a client once, and end its remaining processes. Return its exit code and its last line of output.

    The exit code is -1 for a client that was ended after `SECONDS`.
    """
    meant = {"base": recorder.url, "key": made.key, "folder": str(FOLDER), "home": str(home), "name": client.name}

    def filled(text: str) -> str:
        for name, value in meant.items():
            text = text.replace("{" + name + "}", value)
        return text

    for name, text in client.files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(filled(text))
    if client.npm:  # the program must find its libraries in the same folder
        (home / "node_modules").symlink_to(FOLDER / client.name / "node_modules")
    known = {name: value for name, value in environment().items() if name not in ("PYTHONPATH", "LD_PRELOAD")}
    known = {name: value for name, value in known.items() if name not in BUNDLE_VARIABLES}
    known |= {"HOME": str(home), **variables(client, made, recorder)}
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
    """Replace the texts and identities of a client."""
    if key == "client_metadata":
        return {}
    if isinstance(value, dict):
        return {name: without_words(one, name) for name, one in cast(dict[str, Any], value).items()}
    if isinstance(value, list):
        return [without_words(one, key) for one in cast(list[Any], value)]
    if isinstance(value, str) and key in IDS:
        return f"{key}-1"
    if isinstance(value, str) and key in WORDS and value not in KEPT:
        return ("word " * 12)[: max(1, min(len(value), 60))].strip()
    return value


def tidied(exchanges: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the exchanges that differ, in the form of the recordings."""
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
        made.up("router.queue_timeout_seconds=60", "http.tls=on")
        authority = made.cli("trust-ca", "--print")
        write_bundle(made.state, authority["pem"], authority["fingerprint"], made.base)
        made.join("mini", *MLX)
        for name, settings in OTHERS.items():
            made.join(name, *settings)
        yield made


def main() -> int:
    """Run all clients that can run here, or the named ones. Return 1 if one fails, otherwise 0."""
    wanted, bad = set(sys.argv[1:]), 0
    RECORDED.mkdir(exist_ok=True)
    with _pool() as made:
        for client in CLIENTS:
            if not client.command or (wanted and client.name not in wanted):
                continue
            install(client)
            with (
                tempfile.TemporaryDirectory(prefix="mp-") as home,
                recording(made.base, made.state / "authority" / "endpoint.pem") as recorder,
            ):
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
