"""Transfer of a token to a new Mac: through a pipe or a file, never as an argument that every user could read."""

import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import coordinator.cli.commands.join as verbs
from coordinator.cli import cluster
from coordinator.joining.join_tokens import build_join_command

TOKEN = "mpj1.pin.id.secret"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], str]]:
    """Return the arguments of the started node, and the text that its token descriptor holds."""
    found: list[tuple[list[str], str]] = []

    def execute(_: str, arguments: list[str]) -> None:
        descriptor = int(arguments[arguments.index("--token-fd") + 1])
        assert os.get_inheritable(descriptor)
        os.set_blocking(descriptor, False)
        text = os.read(descriptor, 1000)
        assert os.read(descriptor, 1000) == b"", "the other end is closed"
        found.append((arguments, text.decode()))
        os.close(descriptor)

    monkeypatch.setattr(verbs.os, "execv", execute)
    return found


def test_join_refuses_a_token_argument_and_prints_the_right_command(started: list[tuple[list[str], str]]) -> None:
    refused = CliRunner().invoke(cluster, ["join", "127.0.0.1:8081", "--token", TOKEN])
    assert refused.exit_code == 2
    assert "echo TOKEN | cluster join URL --token-file -" in " ".join(refused.output.split())
    assert TOKEN not in refused.output
    assert not started


@pytest.mark.parametrize("how", ["file", "pipe"])
def test_a_token_comes_from_a_file_or_a_pipe(how: str, tmp_path: Path, started: list[tuple[list[str], str]]) -> None:
    (tmp_path / "token").write_text(TOKEN + "\n")
    source = str(tmp_path / "token") if how == "file" else "-"
    CliRunner().invoke(cluster, ["join", "127.0.0.1:8081", "--token-file", source], input=f"{TOKEN}\n")
    ((arguments, read),) = started
    assert read.strip() == TOKEN
    assert not any("secret" in argument for argument in arguments)


def test_options_of_join_are_those_of_the_node(tmp_path: Path, started: list[tuple[list[str], str]]) -> None:
    line = ["join", "10.0.0.1:8081", "--token-file", "-", "--state", str(tmp_path), "--name", "studio", "--models", "a"]
    line += ["--models", "b", "--allow-missing-folders", "--set", "memory.cap=8GiB", "-o", "json"]
    CliRunner().invoke(cluster, line, input=f"{TOKEN}\n")
    ((arguments, _),) = started
    assert arguments[:4] == [sys.executable, "-P", "-m", "node.run"], "the working directory has no modules of it"
    words = arguments[arguments.index("node.run") + 1 : arguments.index("--token-fd")]
    assert words == [
        *("--state", str(tmp_path), "--output", "json", "--url", "10.0.0.1:8081", "--models", "a", "--models", "b"),
        *("--allow-missing-folders", "--set", "memory.cap=8GiB", "--set", "node.name=studio"),
    ]


def test_with_joined_only_a_machine_without_a_cluster_ends_at_once(
    tmp_path: Path, started: list[tuple[list[str], str]]
) -> None:
    words = ["join", "--state", str(tmp_path), "--joined-only"]
    done = CliRunner().invoke(cluster, words)
    assert (done.exit_code, done.stdout, started) == (0, "", [])
    assert done.stderr == f"{tmp_path} is in no cluster: there is no node to start\n"
    (tmp_path / "node" / "identity").mkdir(parents=True)
    (tmp_path / "node" / "identity" / "identity.json").write_text("{}")
    CliRunner().invoke(cluster, [*words, "--token-file", "-"], input=f"{TOKEN}\n")
    ((arguments, _),) = started
    words = arguments[arguments.index("node.run") + 1 : arguments.index("--token-fd")]
    assert words == ["--state", str(tmp_path), "--output", "text"]


def test_printed_join_command_passes_the_token_through_a_pipe() -> None:
    line = build_join_command("macpool://10.0.0.1:8081", TOKEN)
    echo, _, command = line.partition(" | ")
    assert echo == f"echo {TOKEN}"
    assert command == "cluster join macpool://10.0.0.1:8081 --token-file -"


@pytest.mark.parametrize("url", ["https://studio.local:8080", "https://studio.local:8080/v1", "http://studio.local"])
def test_join_refuses_the_http_endpoint_and_prints_the_right_command(
    url: str, started: list[tuple[list[str], str]]
) -> None:
    refused = CliRunner().invoke(cluster, ["join", url])
    assert refused.exit_code == 2
    text = " ".join(refused.output.split())
    assert "cluster join macpool://studio.local:8081 --token-file FILE" in text
    assert "`cluster token create` on the coordinator prints the complete command" in text
    assert not started
