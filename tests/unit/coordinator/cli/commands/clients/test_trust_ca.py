"""`cluster trust-ca` against an endpoint with its own authority: its files and the tools that it runs."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from coordinator.cli import cluster
from coordinator.cli.commands.clients import trust_ca
from coordinator.cli.commands.clients.trust_ca import find_trusted_endpoint
from coordinator.client.errors import NOT_FOUND, PIN, REFUSED, UNREACHABLE
from tests.support.coordinator.https_endpoint import HttpsEndpoint, https_endpoint

TOOL = """#!/bin/sh
echo "$(basename $0) $*" >> {log}
[ -e {folder}/fails ] && echo "not permitted" >&2 && exit 1
exit 0
"""


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put tools in place of those of the system, which write their arguments into a file. Return that file."""
    folder, log = tmp_path / "tools", tmp_path / "tools.log"
    folder.mkdir()
    for name in ("install", "rm", "update-ca-certificates", "security"):
        (folder / name).write_text(TOOL.format(log=log, folder=folder))
        (folder / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(trust_ca, "BUNDLES", ())
    return log


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[HttpsEndpoint]:
    with https_endpoint(tmp_path) as made:
        yield made


def run(tmp_path: Path, *words: str) -> Result:
    return CliRunner().invoke(cluster, ["trust-ca", "--state", str(tmp_path / "state"), *words])


def test_trust_is_added_and_removed_with_all_of_its_files(tmp_path: Path, tools: Path, endpoint: HttpsEndpoint):
    state, fingerprint = tmp_path / "state", endpoint.fingerprint
    added = run(tmp_path, endpoint.url, "--fingerprint", fingerprint.upper(), "-o", "json")
    bundle = state / "trusted" / f"{fingerprint[:16]}.pem"
    assert (added.exit_code, json.loads(added.stdout)) == (
        0,
        {"schema": 1, "fingerprint": fingerprint, "trusted": True, "bundle": str(bundle)},
    )
    assert (bundle.read_text(), bundle.with_suffix(".url").read_text()) == (endpoint.pem, endpoint.url + "\n")
    assert find_trusted_endpoint(state, endpoint.url) == (endpoint.url, str(bundle))
    place = f"/usr/local/share/ca-certificates/macpool-{fingerprint[:16]}.crt"
    first, second = tools.read_text().splitlines()
    assert first.startswith("install -m 644 ")
    assert (first.endswith(f" {place}"), second) == (True, "update-ca-certificates ")
    tools.unlink()
    removed = run(tmp_path, endpoint.url, "--remove")
    assert (removed.exit_code, removed.stdout) == (0, "no longer trusted\n")
    assert list((state / "trusted").iterdir()) == []
    assert find_trusted_endpoint(state, None) is None
    assert tools.read_text().splitlines() == [f"rm -f {place}", "update-ca-certificates "]


def test_programs_of_administrators_are_found_although_the_path_lacks_their_folder(
    tmp_path: Path, tools: Path, endpoint: HttpsEndpoint, monkeypatch: pytest.MonkeyPatch
):
    program, folder = tmp_path / "tools" / "update-ca-certificates", tmp_path / "sbin"
    folder.mkdir()
    program.rename(folder / program.name)
    monkeypatch.setattr(trust_ca, "SYSTEM_FOLDERS", (str(folder),))
    monkeypatch.setenv("PATH", str(tmp_path / "tools"))
    (tmp_path / "tools" / "basename").symlink_to("/usr/bin/basename")
    added = run(tmp_path, endpoint.url, "--fingerprint", endpoint.fingerprint)
    assert added.exit_code == 0, added.output
    assert tools.read_text().splitlines()[1] == "update-ca-certificates "


def test_print_shows_the_certificate_and_trusts_nothing(tmp_path: Path, tools: Path, endpoint: HttpsEndpoint):
    printed = run(tmp_path, endpoint.url, "--print")
    assert (printed.exit_code, printed.stdout) == (0, endpoint.pem)
    assert not tools.exists()
    assert not (tmp_path / "state").exists()


def test_nothing_is_trusted_without_a_confirmed_fingerprint(tmp_path: Path, tools: Path, endpoint: HttpsEndpoint):
    for words, code in (([], 2), (["--fingerprint", "ab" * 32], PIN)):
        refused = run(tmp_path, endpoint.url, *words)
        assert refused.exit_code == code
        assert endpoint.fingerprint in refused.stderr
    assert not tools.exists()
    assert not (tmp_path / "state").exists()


def test_a_tool_that_fails_names_the_next_step(tmp_path: Path, tools: Path, endpoint: HttpsEndpoint):
    (tmp_path / "tools" / "fails").touch()
    failed = run(tmp_path, endpoint.url, "--fingerprint", endpoint.fingerprint)
    assert failed.exit_code == 1
    assert "failed (not permitted): run it again with sudo" in failed.stderr
    assert len(tools.read_text().splitlines()) == 1, "the second tool does not run"


@pytest.mark.parametrize(
    ("status", "pem", "code", "words"),
    [
        (404, "", NOT_FOUND, "uses given certificate files"),
        (200, "no certificate", 1, "sent no certificate"),
        (503, "", REFUSED, ""),
    ],
)
def test_an_endpoint_without_a_usable_authority_is_refused(
    tmp_path: Path, tools: Path, endpoint: HttpsEndpoint, status: int, pem: str, code: int, words: str
):
    endpoint.statuses["/api/v1/ca.pem"], endpoint.pem = status, pem
    refused = run(tmp_path, endpoint.url, "--fingerprint", endpoint.fingerprint)
    assert words in refused.stderr
    assert (refused.exit_code, tools.exists()) == (code, False)


def test_an_endpoint_that_does_not_use_https_has_nothing_to_trust(tmp_path: Path, tools: Path):
    with https_endpoint(tmp_path, tls=False) as plain:
        assert run(tmp_path, plain.url).exit_code == 2
        unreachable = run(tmp_path, plain.url.replace("http:", "https:"))
    assert (unreachable.exit_code, tools.exists()) == (UNREACHABLE, False)
