"""Options of `cluster up`: those that are refused before anything is created, and those that reach the coordinator.

Also its output and its exit codes."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from coordinator import run as coordinator_run
from coordinator.backup.generation_fence import SupersededError
from coordinator.cli import cluster
from coordinator.cli.commands.up import ListenAddress
from coordinator.client import config_inspect
from coordinator.client.errors import REFUSED
from coordinator.cluster.local_node import LocalNodeElsewhereError
from coordinator.startup.options import RunOptions
from coordinator.state.store_errors import StoreError
from coordinator.tls.cluster_ca import AuthorityError
from host import local_names
from host.node_marks import has_left, mark_left
from host.settings_loader import SettingsError
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


FACTS: dict[str, Any] = {
    "base_url": "http://192.168.1.5:8080/v1",
    "join": "echo mpj1.x | cluster join macpool://192.168.1.5:8081 --token-file -",
    "tls": False,
    "trust": None,
    "local_node_ready": None,
}
WELCOME = ["endpoint  http://192.168.1.5:8080/v1", f"add a Mac {FACTS['join']}", "Ctrl-C stops it"]
Up = Callable[..., Result]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[RunOptions]:
    """Return the options of each coordinator that takes no time, and hide the settings of this environment."""
    found: list[RunOptions] = []

    async def serve(options: RunOptions, ready: Callable[[dict[str, Any]], None]) -> None:
        found.append(options)
        ready(FACTS)

    monkeypatch.setattr(coordinator_run, "serve", serve)
    report = {"faults": [], "error": "", "settings": [], "unsuitable": ""}
    monkeypatch.setattr(config_inspect, "read_node_settings", lambda *_: report)
    monkeypatch.setattr(local_names, "read_local_name", lambda: "studio")
    for name in [name for name in os.environ if name.startswith("MACPOOL_")]:
        monkeypatch.delenv(name)
    return found


def up(folder: Path, *words: str) -> Result:
    return CliRunner().invoke(cluster, ["up", "--state", str(folder), *words])


def test_addresses_and_settings_reach_the_coordinator(
    tmp_path: Path, started: list[RunOptions], monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "config.toml").write_text(
        "[router]\nqueue_limit = 1\nmax_body_bytes = 2048\n[cluster]\nname = 'file'\n"
    )
    monkeypatch.setenv("MACPOOL_ROUTER__QUEUE_LIMIT", "2")
    monkeypatch.setenv("MACPOOL_CLUSTER__NAME", "environment")
    assert up(tmp_path, "--no-local-node", "--set", "cluster.name=flag").exit_code == 0
    (options,) = started
    assert (options.state, options.listen, options.cluster_listen) == (
        tmp_path,
        ("127.0.0.1", 8080),
        ("0.0.0.0", 8081),
    )
    assert (options.local_node, options.node_arguments) == (False, ())
    settings = options.settings
    assert (settings.router.max_body_bytes, settings.router.queue_limit, settings.cluster.name) == (2048, 2, "flag")
    origins = {row["key"]: row["origin"] for row in options.origins if row["origin"] != "default"}
    assert origins == {
        "router.max_body_bytes": str(tmp_path / "config.toml"),
        "router.queue_limit": "environment",
        "cluster.name": "--set",
    }
    up(tmp_path, "--no-local-node", "--lan", "--cluster-listen", "[::1]:0")
    assert (started[1].listen, started[1].cluster_listen) == (("0.0.0.0", 8080), ("::1", 0))
    up(tmp_path, "--no-local-node", "--listen", "10.0.0.7:80")
    assert started[2].listen == ("10.0.0.7", 80)


def test_options_of_the_node_reach_the_node(tmp_path: Path, started: list[RunOptions]):
    missing = str(tmp_path / "missing")
    words = (
        "--models",
        missing,
        "--models",
        str(tmp_path),
        "--set",
        "memory.cap=8GiB",
        "--set",
        "router.queue_limit=3",
    )
    assert up(tmp_path, *words).exit_code == 2
    assert up(tmp_path, *words, "--allow-missing-folders").exit_code == 0
    (options,) = started
    assert options.local_node
    assert options.node_arguments == (
        *("--set", "memory.cap=8GiB", "--models", missing, "--models", str(tmp_path)),
        "--allow-missing-folders",
    )
    assert options.settings.router.queue_limit == 3


def test_a_node_that_left_is_started_only_with_its_option(tmp_path: Path, started: list[RunOptions]):
    (tmp_path / "node").mkdir()
    mark_left(tmp_path / "node")
    left = "this Mac's own node has left the cluster; --local-node lets it join again"
    assert up(tmp_path).stdout.splitlines() == [*WELCOME, left]
    assert up(tmp_path, "--no-local-node").stdout.splitlines() == WELCOME
    assert has_left(tmp_path / "node")
    assert up(tmp_path, "--local-node").stdout.splitlines() == WELCOME
    assert not has_left(tmp_path / "node")
    assert [options.local_node for options in started] == [False, False, True]


@pytest.mark.parametrize(
    ("words", "changes", "lines"),
    [
        ((), {}, WELCOME),
        (("--lan",), {}, [WELCOME[0], "http://studio.local:8080/v1", "open to the local network", *WELCOME[1:]]),
        (("--lan",), {"tls": True}, [WELCOME[0], "http://studio.local:8080/v1", *WELCOME[1:]]),
        (
            (),
            {"tls": True, "trust": "cluster trust-ca URL"},
            [WELCOME[0], "trust it  cluster trust-ca URL", *WELCOME[1:]],
        ),
        ((), {"api_key": "mp_first"}, [WELCOME[0], "API key   mp_first  (shown only once)", *WELCOME[1:]]),
        ((), {"local_node_ready": True}, WELCOME),
        ((), {"local_node_ready": False}, [*WELCOME, "this Mac's own node does not answer yet"]),
    ],
)
@pytest.mark.usefixtures("started")
def test_the_start_is_printed_as_text_or_as_one_line_of_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], changes: dict[str, Any], lines: list[str]
):
    facts = FACTS | changes

    async def serve(_: RunOptions, ready: Callable[[dict[str, Any]], None]) -> None:
        ready(facts)

    monkeypatch.setattr(coordinator_run, "serve", serve)
    done = up(tmp_path, "--no-local-node", *words)
    printed = [line.strip() for line in done.stdout.splitlines()]
    assert [line[: len(begin)] for line, begin in zip(printed, lines, strict=True)] == lines
    assert done.stderr == "stopped\n"
    done = up(tmp_path, "--no-local-node", *words, "-o", "json")
    assert ([json.loads(line) for line in done.stdout.splitlines()], done.stderr) == ([facts], "")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (SupersededError("this cluster has moved"), REFUSED, "this cluster has moved"),
        (LocalNodeElsewhereError("it is in another cluster"), REFUSED, "it is in another cluster"),
        (SettingsError("tls_key_file is missing"), 2, "tls_key_file is missing"),
        (StoreError("the disk is full"), 1, "the disk is full"),
        (AuthorityError("the CA is damaged"), 1, "the CA is damaged"),
        (OSError(98, "Address already in use"), 1, "Address already in use"),
        (OSError(13, "Permission denied", "/state/lock"), 1, "/state/lock: Permission denied"),
        (OSError("no reason"), 1, "no reason"),
    ],
)
@pytest.mark.usefixtures("started")
def test_a_coordinator_that_fails_has_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, message: str
):
    async def serve(*_: object) -> None:
        raise error

    monkeypatch.setattr(coordinator_run, "serve", serve)
    done = up(tmp_path, "--no-local-node")
    assert (done.exit_code, done.stderr) == (code, f"Error: {message}\n")


def test_a_node_of_another_cluster_is_refused_before_a_new_cluster_is_made(tmp_path: Path, started: list[RunOptions]):
    (tmp_path / "node" / "identity").mkdir(parents=True)
    (tmp_path / "node" / "identity" / "identity.json").write_text('{"cluster": "c1", "node": "n1"}')
    done = up(tmp_path)
    assert (done.exit_code, started) == (REFUSED, [])
    assert up(tmp_path, "--no-local-node").exit_code == 0
    (tmp_path / "cluster.db").write_text("")
    assert up(tmp_path).exit_code == 0, "the coordinator compares the clusters"
