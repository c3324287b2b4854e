"""Options of `cluster up` that are refused before anything is created."""

import os
import subprocess
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from coordinator.cli import cluster
from coordinator.cli.commands.up import ListenAddress
from tests.support.processes import CLI, environment


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:8080", ("127.0.0.1", 8080)),
        ("[::1]:0", ("::1", 0)),
        ("0.0.0.0:65535", ("0.0.0.0", 65535)),
        ("studio.local:1", ("studio.local", 1)),
    ],
)
def test_an_address_is_host_and_port(text: str, address: tuple[str, int]):
    assert ListenAddress().convert(text, None, None) == address
    assert ListenAddress().convert(address, None, None) == address


@pytest.mark.parametrize("text", ["8080", ":8080", "[]:8080", "a:65536", "a:-1", "a:", "a:b", ""])
def test_a_text_without_host_or_port_is_no_address(text: str):
    with pytest.raises(click.BadParameter, match="is not HOST:PORT"):
        ListenAddress().convert(text, None, None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--lan", "--listen", "127.0.0.1:1"), "--lan and --listen exclude each other"),
        (("--no-local-node", "--models", "."), "--models is for the node on this machine"),
        (("--no-local-node", "--set", "memory.cap=1GiB"), "--set memory.cap=1GiB is for the node on this machine"),
        (("--models", "/none"), "--models: /none is not a folder"),
        (("--set", "models.folders=/none"), "models.folders (--set): /none is not a folder"),
        (("--set", "router.polici=x"), "router.polici"),
        (("--set", "memory.cap=much"), "memory.cap"),
    ],
)
def test_wrong_options_create_nothing(tmp_path: Path, words: tuple[str, ...], message: str):
    plain = dict.fromkeys(name for name in os.environ if name.startswith("MACPOOL_"))
    done = CliRunner(env=plain).invoke(cluster, ["up", "--state", str(tmp_path / "state"), *words])
    assert (done.exit_code, message in done.stderr) == (2, True), done.output
    assert not (tmp_path / "state").exists()


def test_a_file_in_place_of_the_state_folder_is_a_clear_error(tmp_path: Path):
    (tmp_path / "state").write_text("")
    line = ["up", "--state", str(tmp_path / "state"), "--listen", "127.0.0.1:0", "--cluster-listen", "127.0.0.1:0"]
    done = subprocess.run([*CLI, *line], capture_output=True, text=True, env=environment(), cwd=tmp_path, timeout=60)
    assert (done.returncode, done.stderr.splitlines()[-1][:7]) == (1, "Error: ")
    assert "Traceback" not in done.stderr
