"""No command prints control sequences that a terminal would obey, for any names, messages and logs of the pool."""

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from coordinator.cli import COMMANDS, cluster
from coordinator.client.api_client import ApiSession
from coordinator.client.errors import REFUSED, CommandError
from coordinator.client.terminal_text import SanitizedStream, replace_control_characters
from tests.contract.test_conventions import ARGUMENTS, READING
from tests.support.cluster.whole_pool import Served, served
from tests.support.processes import ROOT

ATTACK = "\x1b]0;owned\x07\x1b[2J\x1b[8m\x9b31m\x7f\u202egnp\u2066\r\x08\u2028\ud800"
OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
COLOUR = re.compile(r"\x1b\[(0|1|2|3[1-6]|90|1;3[123])?m")
FIXED = frozenset(
    {
        "state",
        "status",
        "result",
        "severity",
        "created",
        "expires",
        "timestamp",
        "url",
        "base_url",
        "policy",
        "reason",
        "id",
        "schema",
        "sharing",
        "secret",
        "kind",
        "created_at",
        "model",
    }
)
"""Values that commands use for look-ups or calculations."""


def _poisoned(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        return {key: _poisoned(one, key) for key, one in value.items()}
    if isinstance(value, list):
        return [_poisoned(one, name) for one in value]
    return f"{value}{ATTACK}" if isinstance(value, str) and name not in FIXED else value


class Poisoned:
    """An answer of the coordinator whose texts hold escape sequences."""

    def __init__(self, answer: Any) -> None:
        self.status, self.length = answer.status, 0
        self._rest = self._poison(answer.read())

    def _poison(self, raw: bytes) -> bytes:
        try:
            return json.dumps(_poisoned(json.loads(raw))).encode()
        except ValueError:
            event = {"timestamp": "2026-11-23T00:00:00Z", "level": "info", "event": ATTACK, "name": ATTACK}
            line = b"data: " + json.dumps(event).encode()
            return b"\n".join([raw, line, ATTACK.encode(errors="surrogatepass"), b""])

    def read(self) -> bytes:
        rest, self._rest = self._rest, b""
        return rest

    def read1(self, size: int) -> bytes:
        return self.read()

    def getheader(self, name: str, default: str = "") -> str:
        return default


@pytest.fixture(scope="module")
def pool() -> Iterator[Served]:
    with served() as made:
        yield made


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Poison every answer that a command gets; return the requested paths."""
    asked: list[str] = []
    plain = ApiSession.send_request

    def request(self: ApiSession, method: str, path: str, *rest: Any, **more: Any) -> Any:
        asked.append(path)
        return Poisoned(plain(self, method, path, *rest, **more))

    monkeypatch.setattr(ApiSession, "send_request", request)
    return asked


def _run_verb(verb: str, pool: Served, folder: Path, *, color: bool) -> str:
    (folder / "key").write_text(pool.keys["admin"])
    clean = dict.fromkeys(("MACPOOL_STATE", "MACPOOL_URL", "MACPOOL_KEY_FILE", "NO_COLOR", "FORCE_COLOR"))
    where = ["--state", str(folder), "--url", pool.url, "--key-file", str(folder / "key")]
    runner = CliRunner(env={**clean, "PYTHONPATH": str(ROOT)})
    return runner.invoke(cluster, [*verb.split(), *ARGUMENTS.get(verb, []), *where], color=color).output


LOCAL = ("config", "service", "completion", "simulate", "doctor", "open", "backup", "metrics-config", "env")
ASKING = [verb for verb in READING if not verb.startswith(LOCAL)]


def test_most_commands_query_the_coordinator() -> None:
    assert len(ASKING) > 15


@pytest.mark.parametrize("color", [False, True])
@pytest.mark.parametrize("verb", ASKING)
def test_commands_print_no_control_sequences(
    verb: str, pool: Served, tmp_path: Path, hostile: list[str], *, color: bool
) -> None:
    said = _run_verb(verb, pool, tmp_path, color=color)
    assert hostile, "it asked nothing"
    assert said.strip()
    assert OBEYED.search(COLOUR.sub("", said)) is None, repr(said)


@click.command()
def careless() -> None:
    """Print texts of other machines, as a new command might."""
    print(ATTACK)
    click.echo(ATTACK, err=True)
    click.secho("fine", fg="red")


def test_every_verb_writes_through_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "careless", (f"{__name__}:careless", ""))
    done = CliRunner().invoke(cluster, ["careless"], color=True)
    assert OBEYED.search(COLOUR.sub("", done.output)) is None
    assert "\x1b[31mfine" in done.output


def test_errors_are_harmless() -> None:
    error = CommandError(REFUSED, ATTACK)
    assert OBEYED.search(error.message) is None
    assert error.exit_code == REFUSED
    assert replace_control_characters("plain\n\täöü 漢字 ✓") == "plain\n\täöü 漢字 ✓"


def test_a_stream_of_another_encoding_is_written_all_the_same() -> None:
    buffer = io.BytesIO()
    stream = SanitizedStream(io.TextIOWrapper(buffer, encoding="ascii"))
    stream.write("ä\x1b[2J\x1b[31mred")
    stream.flush()
    assert buffer.getvalue() == b"??[2J\x1b[31mred"
