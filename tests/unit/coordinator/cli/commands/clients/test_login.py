"""`cluster login` and `cluster logout` against an endpoint that knows one key."""

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from coordinator.cli import cluster
from coordinator.client.api_client import LOGIN_FILE
from coordinator.client.errors import DENIED, PIN, REFUSED, UNREACHABLE
from tests.support.coordinator.https_endpoint import HttpsEndpoint, https_endpoint

KEY = "mp_a_b"


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[HttpsEndpoint]:
    with https_endpoint(tmp_path, KEY) as made:
        yield made


def run(tmp_path: Path, *words: str, text: str = f"{KEY}\n") -> Result:
    return CliRunner().invoke(cluster, [*words, "--state", str(tmp_path / "state")], input=text)


def test_login_stores_url_key_and_authority_until_logout(tmp_path: Path, endpoint: HttpsEndpoint):
    file = tmp_path / "state" / LOGIN_FILE
    trusted = ("--fingerprint", endpoint.fingerprint)
    made = run(tmp_path, "login", endpoint.url + "/", "--key-file", "-", *trusted, "-o", "json")
    assert made.exit_code == 0, made.stderr
    assert json.loads(made.stdout) == {"schema": 1, "url": endpoint.url, "file": str(file)}
    assert json.loads(file.read_text()) == {"url": endpoint.url, "key": KEY, "ca": endpoint.pem}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert run(tmp_path, "logout").stdout == "logged out\n"
    assert not file.exists()
    assert run(tmp_path, "logout").stdout == "not logged in\n"


@pytest.mark.parametrize(("status", "accepted"), [(200, True), (403, True), (500, False)])
def test_a_key_of_another_scope_is_accepted_and_a_faulty_endpoint_is_not(tmp_path: Path, status: int, accepted: bool):
    with https_endpoint(tmp_path, KEY, tls=False) as plain:
        plain.statuses["/v1/models"] = status
        made = run(tmp_path, "login", plain.url, "--key-file", "-")
    assert made.exit_code == (0 if accepted else UNREACHABLE)
    assert (tmp_path / "state" / LOGIN_FILE).exists() is accepted
    if accepted:
        assert json.loads((tmp_path / "state" / LOGIN_FILE).read_text())["ca"] == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mp_a_c\n", "refuses this key"),
        ("sk-openai\n", "a key begins with mp_"),
        ("mp_a b\n", "a key begins with mp_"),
        ("mp_\u00e4\n", "a key begins with mp_"),
        ("\n", "a key begins with mp_"),
    ],
)
def test_a_wrong_key_is_not_stored(tmp_path: Path, endpoint: HttpsEndpoint, text: str, words: str):
    made = run(tmp_path, "login", endpoint.url, "--key-file", "-", "--fingerprint", endpoint.fingerprint, text=text)
    assert made.exit_code == DENIED
    assert words in made.stderr
    assert not (tmp_path / "state" / LOGIN_FILE).exists()


def test_a_key_file_is_read_and_a_missing_one_named(tmp_path: Path, endpoint: HttpsEndpoint):
    file = tmp_path / "key"
    words = ("login", endpoint.url, "--fingerprint", endpoint.fingerprint, "--key-file", str(file))
    missing = run(tmp_path, *words)
    assert missing.exit_code == DENIED
    assert f"{file} cannot be read" in missing.stderr
    file.write_text(f" {KEY}\n")
    assert run(tmp_path, *words).exit_code == 0


@pytest.mark.parametrize(
    ("fingerprint", "code"), [("ab" * 32, PIN), (None, 2)], ids=["another authority", "no terminal to compare"]
)
def test_an_authority_that_is_not_confirmed_gets_no_key(
    tmp_path: Path, endpoint: HttpsEndpoint, fingerprint: str | None, code: int
):
    words = () if fingerprint is None else ("--fingerprint", fingerprint)
    assert run(tmp_path, "login", endpoint.url, "--key-file", "-", *words).exit_code == code
    assert not (tmp_path / "state").exists()


def test_a_fingerprint_without_https_and_a_key_without_a_file_or_terminal_are_wrong_usage(tmp_path: Path):
    with https_endpoint(tmp_path, KEY, tls=False) as plain:
        assert run(tmp_path, "login", plain.url, "--key-file", "-", "--fingerprint", "ab" * 32).exit_code == 2
        assert run(tmp_path, "login", plain.url).exit_code == 2


@pytest.mark.parametrize("runs", [True, False])
def test_a_running_coordinator_of_the_folder_is_not_replaced_by_a_login(
    tmp_path: Path, endpoint: HttpsEndpoint, runs: bool
):
    (tmp_path / "state").mkdir()
    pid = os.getpid() if runs else 2**22 + 1
    (tmp_path / "state" / "run.json").write_text(json.dumps({"url": "http://127.0.0.1:1", "secret": "x", "pid": pid}))
    made = run(tmp_path, "login", endpoint.url, "--key-file", "-", "--fingerprint", endpoint.fingerprint)
    assert made.exit_code == (REFUSED if runs else 0)
    assert (tmp_path / "state" / LOGIN_FILE).exists() is not runs
