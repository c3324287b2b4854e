"""The command line: groups, suggestions, old spellings, one form of errors, names in place of ids, confirmations."""

import json
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

import coordinator.cli as command
import coordinator.cli.group as shape
from coordinator.cli import COMMANDS, NAMES, cluster
from docs.generate import contexts
from tests.support.cluster.whole_pool import Served, served
from tests.support.coordinator.answering_server import Server
from tests.support.processes import CLI, environment

OPEN_TO_ALL = all(
    folder.stat().st_mode & stat.S_IXOTH
    for base in (Path(sys.base_prefix), Path(command.__file__).parent)
    for folder in (base, *base.resolve().parents)
)
CLEAN: dict[str, str | None] = dict.fromkeys(("MACPOOL_STATE", "MACPOOL_URL", "MACPOOL_KEY_FILE"))


@pytest.fixture(scope="module")
def pool() -> Iterator[Served]:
    with served() as made:
        yield made


@pytest.fixture
def run(pool: Served, tmp_path: Path) -> Callable[..., Result]:
    """Return a function that runs a verb with the pool's admin key."""
    (tmp_path / "key").write_text(pool.keys["admin"])
    where = ["--state", str(tmp_path), "--url", pool.url, "--key-file", str(tmp_path / "key")]
    return lambda *words: CliRunner(env=CLEAN).invoke(cluster, [*words, *where])


def alone(*words: str, **more: Any) -> Result:
    return CliRunner(env=CLEAN).invoke(cluster, list(words), **more)


# spelling


@pytest.mark.parametrize("old", shape.MOVED)
def test_former_command_is_refused_with_its_replacement(old: tuple[str, ...]):
    done = alone(*old, "a", "-o", "json")
    assert done.exit_code == 2
    line = done.output.splitlines()[1].split()
    assert line == ["cluster", *shape.MOVED[old], "a", "-o", "json"]
    known = {path for path, _ in contexts()}
    assert ("cluster", *shape.MOVED[old]) in known
    assert ("cluster", *old) not in known


def test_the_replacement_of_a_former_command_can_be_pasted_into_a_shell():
    line = alone("nodes", "label", "studio", "the big one; it's $5").output.splitlines()[1]
    assert shlex.split(line) == ["cluster", "node", "label", "studio", "the big one; it's $5"]


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["nods"], "cluster nodes"),
        (["keys"], "cluster key"),
        (["key", "ls"], "cluster key list"),
        (["key", "rm"], "cluster key revoke"),
        (["node", "rm"], "cluster node remove"),
        (["node", "describe"], "cluster node show"),
        (["token", "new"], "cluster token create"),
        (["help", "key", "limits"], "cluster key limit"),
        (["pulls", "stop"], "cluster pulls cancel"),
        (["video", "download"], "cluster video get"),
    ],
)
def test_an_unknown_verb_names_the_nearest(words: list[str], meant: str):
    done = alone(*words)
    assert done.exit_code == 2
    assert f"did you mean `{meant}`?" in done.output


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["key", "create", "a", "--rpm", "5"], "there is no option --rpm; did you mean --requests-per-minute?"),
        (["key", "limit", "a", "--tpm", "5"], "there is no option --tpm; did you mean --tokens-per-minute?"),
        (["key", "create", "a", "--expire", "5"], "there is no option --expire; did you mean --expires?"),
        (["nodes", "--jason"], "there is no option --jason"),
        (["nodes", "-x"], "there is no option -x"),
    ],
)
def test_an_unknown_option_names_the_one_that_it_abbreviates_or_resembles(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], text: str
):
    monkeypatch.setattr(sys, "argv", ["cluster", *words])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    assert capsys.readouterr().err.splitlines()[0] == f"Error: {text}"


def test_every_group_lists_and_shows():
    verbs = {path for path, _ in contexts()}
    for group in ("node", "model", "key", "video"):
        assert {("cluster", group, "list"), ("cluster", group, "show")} <= verbs
    groups = [context.command for _, context in contexts() if isinstance(context.command, click.Group)]
    assert all(isinstance(group, shape.CommandGroup) for group in groups)


def test_help_and_version_have_their_usual_forms():
    assert alone("help").output == alone("--help").output
    assert alone("help", "key", "limit").output == alone("key", "limit", "--help").output
    assert alone("--version").output.startswith("macpool ")
    assert all(line in alone("--help").output for line in COMMANDS)


def test_a_program_of_another_name_is_the_command_of_the_manual(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["/opt/coordinator/cli/__main__.py", "nods"])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    assert "there is no `cluster nods`; did you mean `cluster nodes`?" in capsys.readouterr().err


@pytest.mark.parametrize(("value", "color"), [("1", False), ("", None)])
def test_colours_are_off_with_no_color_unless_it_is_empty(
    monkeypatch: pytest.MonkeyPatch, value: str, color: bool | None
):
    monkeypatch.setenv("NO_COLOR", value)
    assert cluster.make_context("cluster", ["nodes"]).color is color


def test_the_command_has_a_second_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", ["/opt/bin/macpool", "nods"])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    assert "`macpool nodes`" in capsys.readouterr().err
    assert "macpool" in NAMES
    assert "_MACPOOL_COMPLETE" in alone("completion", "bash", prog_name="macpool").output


# errors and Ctrl-C


@pytest.mark.parametrize(
    "words", [["nods"], ["key", "create"], ["nodes", "--nope"], ["nodes", "--state", "/nowhere"], ["pause", "2x"]]
)
def test_every_error_has_one_form(words: list[str]):
    done = alone(*words)
    assert done.stderr.startswith("Error: ")
    assert done.stdout == ""
    assert done.exit_code in (2, 3, 5)
    assert ("Usage: " in done.stderr) is (words in (["key", "create"], ["nodes", "--nope"], ["pause", "2x"]))


@pytest.mark.skipif(os.geteuid() == 0 and not OPEN_TO_ALL, reason="other users cannot read Python or this repository")
@pytest.mark.parametrize(
    "words", ["leave --yes", "pause", "backup x", "logout", "login http://127.0.0.1:9", "config check"]
)
def test_the_state_folder_of_another_user_is_named_without_a_traceback(tmp_path: Path, words: str):
    """The parent of the folder admits only its owner; a process of root gives up its rights until its end."""
    folder = tmp_path / "home"
    (folder / "macpool").mkdir(parents=True)
    folder.chmod(0)
    child = (
        "import os, atexit; os.geteuid() or (os.seteuid(65534), atexit.register(os.seteuid, 0)); "
        "from coordinator.cli import main; main()"
    )
    line = [sys.executable, "-P", "-c", child, *words.split(), "--state", str(folder / "macpool")]
    if words == "config check":
        line = [*line[:-2], str(folder / "macpool" / "config.toml")]
    try:
        done = subprocess.run(line, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environment())
    finally:
        folder.chmod(0o700)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
    assert re.search(rf"^Error: {re.escape(str(folder))}/macpool/.* is not permitted to this user: ", done.stderr)


@pytest.mark.parametrize("words", ["join macpool://127.0.0.1:1 --token-file", "login http://127.0.0.1:1 --key-file"])
def test_a_secret_that_is_no_text_is_a_clear_error(tmp_path: Path, words: str):
    (tmp_path / "secret").write_bytes(b"\xff\xfe\n")
    done = alone(*words.split(), str(tmp_path / "secret"), "--state", str(tmp_path))
    assert done.stderr.startswith("Error: ")
    assert "is no text" in done.stderr
    assert done.exit_code in (2, 4)


def test_a_coordinator_that_cannot_write_a_file_names_it(tmp_path: Path):
    (tmp_path / "logs").write_text("")
    listen = ["--listen", "127.0.0.1:1", "--cluster-listen", "127.0.0.1:2", "--no-local-node"]
    line = [*CLI, "up", *listen, "--state", str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True, env=environment())
    assert done.returncode == 1
    assert f"Error: {tmp_path / 'logs'}" in done.stderr


def test_a_duration_beyond_the_calendar_is_refused():
    done = alone("pause", "9999999d")
    assert done.exit_code == 2
    assert "'9999999d' is more than ten years" in done.stderr


def test_interrupted_command_prints_stopped(monkeypatch: pytest.MonkeyPatch):
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(COMMANDS, "long", (f"{__name__}:long", ""))
    monkeypatch.setattr(sys.modules[__name__], "long", click.Command("long", callback=interrupt), raising=False)
    done = alone("long")
    assert done.exit_code == 130
    assert done.stderr.splitlines()[-1] == "stopped"


def test_second_interrupt_while_the_first_is_handled_prints_no_traceback(monkeypatch: pytest.MonkeyPatch):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(click, "echo", interrupt)
    monkeypatch.setattr(sys, "argv", ["cluster", "no-such-command"])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 130


# names and questions


def test_a_name_is_as_good_as_an_id(run: Callable[..., Result]):
    key = json.loads(run("key", "create", "laptop", "-o", "json").output)
    assert run("key", "limit", "laptop", "--concurrency", "3").exit_code == 0
    shown = run("key", "show", "laptop").output
    assert key["id"] in shown
    assert "concurrency=3" in shown
    assert run("key", "usage", "laptop").exit_code == 0
    assert run("token", "create", "--name", "lab").exit_code == 0
    assert "uses left 1" in run("token", "show", "lab").output
    assert run("token", "revoke", "lab", "--yes").exit_code == 0
    assert run("key", "revoke", key["id"], "--yes").output == f"key laptop ({key['id']}) revoked\n"
    gone = run("key", "show", "laptop")
    assert (gone.exit_code, "`cluster key list`" in gone.output) == (5, True)


def test_a_key_is_renamed_expires_and_gets_a_new_secret(run: Callable[..., Result]):
    """Runs without a coordinator; tests/contract and the page cover the same with one."""
    made = json.loads(run("key", "create", "laptop", "-o", "json").output)
    run("key", "create", "other")
    assert run("key", "rename", "laptop", "desk").output == f"laptop ({made['id']}) is now desk\n"
    taken = run("key", "rename", "desk", "other")
    assert (taken.exit_code, "use another name" in taken.output) == (6, True)
    assert "expires" in run("key", "expire", "desk", "30d").output
    assert "never" not in run("key", "show", "desk").output
    run("key", "expire", "desk", "--never")
    assert "never" in run("key", "show", "desk").output
    text = run("key", "rotate", "desk", "--yes").output.strip()
    assert text.startswith(f"mp_{made['id']}_")
    assert text != made["key"]


def test_a_name_of_two_is_refused_with_their_ids(run: Callable[..., Result]):
    for _ in range(2):
        run("token", "create", "--name", "twin")
    done = run("token", "revoke", "twin", "--yes")
    assert done.exit_code == 2
    assert "2 tokens are named twin" in done.output


def test_a_limit_changes_only_what_is_named(run: Callable[..., Result]):
    run("key", "create", "bot", "--model", "qwen*", "--tokens-per-minute", "1000", "--priority", "high")
    changed = run("key", "limit", "bot", "--concurrency", "2")
    before, after = changed.output.splitlines()[1:]
    assert before.split() == ["before", "models=qwen*", "tokens_per_minute=1000", "priority=high"]
    assert after.split() == ["after", "models=qwen*", "tokens_per_minute=1000", "priority=high", "concurrency=2"]
    cleared = run("key", "limit", "bot", "--clear", "priority", "--clear", "models")
    assert cleared.output.splitlines()[2].split() == ["after", "tokens_per_minute=1000", "concurrency=2"]
    listed = json.loads(run("key", "show", "bot", "-o", "json").output)["key"]["limits"]
    assert listed == {"tokens_per_minute": 1000, "concurrency": 2}
    assert run("key", "limit", "bot", "--clear", "all").output.splitlines()[2].split() == ["after", "none"]
    assert "upstreams=False" in run("key", "limit", "bot", "--no-upstream").output
    assert "upstreams=True" in run("key", "limit", "bot", "--upstream").output
    assert run("key", "limit", "bot", "--clear", "upstreams").output.splitlines()[2].split() == ["after", "none"]


@pytest.mark.parametrize("words", [[], ["--concurrency", "2", "--clear", "concurrency"]])
def test_a_limit_that_changes_nothing_is_a_mistake(run: Callable[..., Result], words: list[str]):
    run("key", "create", "still")
    done = run("key", "limit", "still", *words)
    assert done.exit_code == 2
    assert "Error: " in done.output


@pytest.mark.parametrize("words", [["key", "revoke", "kept"], ["token", "revoke", "kept"]])
def test_irreversible_commands_ask_for_confirmation(run: Callable[..., Result], words: list[str]):
    run(words[0], "create", *(["--name"] if words[0] == "token" else []), "kept")
    done = run(*words)
    assert done.exit_code == 2
    assert "--yes" in done.output
    listed = run(words[0], "list").output
    assert words[2] in listed


@pytest.mark.parametrize(("answer", "done"), [("y\n", True), ("n\n", False)])
def test_a_question_takes_yes_or_no(monkeypatch: pytest.MonkeyPatch, answer: str, *, done: bool):
    class Terminal:
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(shape.sys, "stdin", Terminal())
    monkeypatch.setattr(click, "confirm", lambda *_, **__: answer == "y\n")
    if done:
        shape.confirm("Sure?", yes=False)
    else:
        with pytest.raises(click.ClickException, match="nothing was changed"):
            shape.confirm("Sure?", yes=False)


# login


def test_login_keeps_url_and_key_for_later_commands(pool: Served, tmp_path: Path):
    state = ["--state", str(tmp_path)]
    done = alone("login", pool.url, "--key-file", "-", *state, input=pool.keys["admin"] + "\n")
    assert done.exit_code == 0, done.output
    kept = tmp_path / "login.json"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert pool.keys["admin"] not in done.output
    assert alone("nodes", *state).exit_code == 0
    assert alone("key", "list", *state).exit_code == 0
    assert alone("logout", *state).output == "logged out\n"
    assert not kept.exists()
    left = alone("nodes", *state)
    assert left.exit_code == 3
    assert "cluster login URL" in left.output


@pytest.mark.parametrize(
    ("url", "key", "code", "words"),
    [
        ("macpool://a:8081", "mp_a_b", 2, "`endpoint`"),
        ("ftp://a", "mp_a_b", 2, "http://HOST:PORT"),
        ("http://[::1", "mp_a_b", 2, "http://HOST:PORT"),
        ("http://a..b:1", "mp_a_b", 2, "http://HOST:PORT"),
        ("http://127.0.0.1:1", "mp_a_b", 3, "cannot be reached"),
        ("", "mp_abcdefgh_" + "x" * 43, 4, "refuses this key"),
        ("", "sk-other", 4, "mp_"),
    ],
)
def test_a_login_that_does_not_work_is_not_kept(
    pool: Served, tmp_path: Path, url: str, key: str, code: int, words: str
):
    done = alone("login", url or pool.url, "--key-file", "-", "--state", str(tmp_path), input=key)
    assert (done.exit_code, words in done.output) == (code, True), done.output
    assert not (tmp_path / "login.json").exists()


@pytest.mark.parametrize("content", ["mp_a_b\nmp_c_d", "mp_\u20ac_b"])
def test_a_key_file_that_has_no_single_key_is_refused(pool: Served, tmp_path: Path, content: str):
    key = tmp_path / "key"
    key.write_text(content)
    done = alone("nodes", "--url", pool.url, "--key-file", str(key), "--state", str(tmp_path))
    assert (done.exit_code, done.output) == (4, f"Error: {key} must contain one key and nothing else\n")


def test_join_refuses_a_malformed_endpoint_of_clients(tmp_path: Path):
    done = alone("join", "http://[::1", "--state", str(tmp_path))
    assert (done.exit_code, "cluster join macpool://HOST:8081" in done.output) == (2, True), done.output


def test_login_is_refused_where_a_coordinator_runs(tmp_path: Path):
    (tmp_path / "run.json").write_text('{"url": "http://127.0.0.1:1", "secret": "mp_x_y"}')
    done = alone("login", "http://127.0.0.1:1", "--key-file", "-", "--state", str(tmp_path), input="mp_a_b")
    assert done.exit_code == 6


def test_a_login_replaces_a_coordinator_that_has_crashed(pool: Served, tmp_path: Path):
    """The key has the scope `metrics`, which may not list the models."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    run = {"url": "http://127.0.0.1:1", "secret": "mp_x_y", "pid": ended.pid}
    (tmp_path / "run.json").write_text(json.dumps(run))
    state = ["--state", str(tmp_path)]
    done = alone("login", pool.url, "--key-file", "-", *state, input=pool.keys["metrics"])
    assert done.exit_code == 0, done.output
    assert alone("nodes", *state).exit_code == 0
    (tmp_path / "run.json").write_text(json.dumps(run | {"pid": os.getpid()}))
    assert alone("nodes", *state).exit_code == 3, "that of the state folder comes first while it runs"


def test_ctrl_c_ends_a_command_with_130_and_without_a_traceback(server: Server):
    server.may.clear()
    asked = threading.Event()
    server.on_request = asked.set
    running = subprocess.Popen(
        [*CLI, "nodes", *server.options],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert asked.wait(60)
        running.send_signal(signal.SIGINT)
        output, error = running.communicate(timeout=60)
    finally:
        running.kill()
        server.may.set()
    assert (running.returncode, output, error) == (130, "", "\nstopped\n")


def test_doctor_lists_its_checks_as_json():
    listed = json.loads(alone("doctor", "--list", "-o", "json").output)["checks"]
    assert [f"{check['id']:<14} {check['title']}" for check in listed] == alone("doctor", "--list").output.splitlines()


def test_command_lists_have_no_truncated_summary():
    groups = [path for path, context in contexts() if isinstance(context.command, click.Group)]
    assert len(groups) > 5
    cut = [(path, line) for path in groups for line in alone(*path[1:], "--help").output.splitlines() if "..." in line]
    assert [(path, line) for path, line in cut if not line.startswith("Usage")] == []
