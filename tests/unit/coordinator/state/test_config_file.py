"""Positions of faults in a settings file, the output of the verbs about them, and secrets that are never printed."""

import json
import os
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from coordinator.cli import cluster
from coordinator.state.config_file import build_syntax_fault, find_line_number, find_line_numbers, redact_value
from coordinator.state.settings import NODE_SECTIONS, CoordinatorSettings
from host.settings_loader import (
    build_setting_rows,
    find_changed_settings,
    find_invalid_settings,
    from_tree,
    list_settings,
    resolve_layers,
)
from node.settings import COORDINATOR_SECTIONS, NodeSettings, check_settings

ROOT = Path(__file__).parents[4]
FILE = """# of the household
[cluster]
nme = "x"   # an unknown one

[memory]
cap = "96GB8"
margin = '1GiB'
[node]
report_busy_seconds = 99
log_level = "loud"
name = \"\"\"
[memory]
tier = 1
\"\"\"
[engine.mlx]
max_batch_size = 8
[alerts]
webhook_url = "https://hooks.example/opensesame?token=opensesame"
"""


def invoke(monkeypatch: pytest.MonkeyPatch, *arguments: str, **environ: str) -> Result:
    for name in [name for name in os.environ if name.startswith("MACPOOL_")]:
        monkeypatch.delenv(name)
    for name, value in {"PYTHONPATH": str(ROOT), **environ}.items():
        monkeypatch.setenv(name, value)
    return CliRunner().invoke(cluster, ["config", *arguments])


def test_find_line_numbers_counts_lines_of_the_file():
    lines = find_line_numbers(FILE)
    assert [
        find_line_number(key, lines) for key in ("cluster.nme", "memory.cap", "memory.margin", "node.log_level")
    ] == [
        3,
        6,
        7,
        10,
    ]
    assert find_line_number("memory.tier", lines) == 5, "the table that would hold it: the text in quotes is no table"
    assert "node.tier" not in lines, "nor is a key"
    assert find_line_number("engine.mlx.max_batch_size", lines) == 16
    assert find_line_number("video.x", lines) == 0


@given(st.dictionaries(st.from_regex(r"[a-z]{1,8}", fullmatch=True), st.integers(), min_size=1, max_size=5))
def test_every_key_of_a_table_has_its_line(table: dict[str, int]):
    text = "\n".join(["[one.two]", *(f"{key} = {value}" for key, value in table.items())])
    assert from_tree(tomllib.loads(text)).keys() <= find_line_numbers(text).keys()
    for number, key in enumerate(table, 2):
        assert find_line_numbers(text)[f"one.two.{key}"] == number


@given(st.text(max_size=200))
def test_find_line_numbers_accepts_any_text(text: str):
    assert all(number >= 1 for number in find_line_numbers(text).values())


def test_build_syntax_fault_has_the_line_of_the_parser():
    with pytest.raises(tomllib.TOMLDecodeError) as caught:
        tomllib.loads("[a]\nb = \n")
    wrong = build_syntax_fault("f.toml", str(caught.value))
    assert wrong.line == 2
    assert "line" not in wrong.text


@pytest.mark.parametrize("kind", [CoordinatorSettings, NodeSettings])
def test_defaults_have_no_fault(kind: type):
    known = {one.key: one.default for one in list_settings(kind)}
    assert find_invalid_settings(kind, known, NODE_SECTIONS) == []


def test_each_fault_of_a_layer_is_found():
    flat = from_tree(tomllib.loads(FILE))
    assert {one.key for one in find_invalid_settings(NodeSettings, flat, COORDINATOR_SECTIONS, check_settings)} == {
        "memory.cap",
        "node.report_busy_seconds",
        "node.log_level",
        "node.name",
    }
    assert [(one.key, one.near) for one in find_invalid_settings(CoordinatorSettings, flat, NODE_SECTIONS)] == [
        ("cluster.nme", "cluster.name")
    ]


def test_check_names_line_key_near_and_meaning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "config.toml").write_text(FILE)
    done = invoke(monkeypatch, "check", "--state", str(tmp_path), MACPOOL_ROUTER__POLICI="x")
    assert done.exit_code == 2
    said = done.output.splitlines()
    place = f"{tmp_path / 'config.toml'}"
    assert said[0].removeprefix("Error: ") == f"{place}:3: cluster.nme: unknown setting; did you mean cluster.name?"
    assert said[1].startswith(f"{place}:6: memory.cap: '96GB8' is not a size")
    assert "it means: Maximum bytes of the engine" in said[1]
    assert said[-1] == "environment: router.polici: unknown setting; did you mean router.policy?"
    assert len(said) == 6
    assert "opensesame" not in done.output


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ('[cluster]\nname = "lab"\n', 0, "valid; settings that are not the default: 1"),
        ("[cluster\n", 2, ":1: not valid TOML"),
        ('[memory]\ncap = "9GiB"\ntier = "safe"\n', 2, "contradicts memory.cap"),
        (None, 5, "there is no file"),
    ],
)
def test_check_of_a_named_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, code: int, says: str):
    if text is not None:
        (tmp_path / "other.toml").write_text(text)
    done = invoke(monkeypatch, "check", str(tmp_path / "other.toml"), "--state", str(tmp_path), MACPOOL_NO__SUCH="1")
    assert (done.exit_code, says in done.output) == (code, True), done.output


def test_check_compares_the_file_of_this_machine_with_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "config.toml"
    file.write_text('[memory]\ncap = "900000GiB"\n')
    done = invoke(monkeypatch, "check", "--state", str(tmp_path))
    assert done.exit_code == 2
    assert f"{file}:2: memory.cap: 900000.0 GiB is more than the RAM of " in done.output
    done = invoke(monkeypatch, "check", "--state", str(tmp_path), "-o", "json")
    (fault,) = json.loads(done.stdout.splitlines()[0])["wrong"]
    assert "is more than the RAM" in fault["text"]
    done = invoke(monkeypatch, "check", str(file), "--state", str(tmp_path))
    assert done.exit_code == 0, "a named file may be that of another machine"


@pytest.mark.parametrize("content", [None, b"[cluster\n", b"name = '\xff'\n"])
def test_show_names_the_fault_of_a_file_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
):
    file = tmp_path / "config.toml"
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content)
    done = invoke(monkeypatch, "show", "--state", str(tmp_path), "http.tls")
    assert done.exit_code == 2
    unreadable = f"Error: {file}: cannot be read: Is a directory: check the owner and the mode of the file\n"
    assert done.stderr == unreadable if content is None else "not valid TOML" in done.stderr


def test_show_gives_every_setting_its_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "config.toml").write_text(FILE)
    done = invoke(
        monkeypatch,
        "show",
        "--state",
        str(tmp_path),
        "-o",
        "json",
        "--set",
        "router.policy=most_headroom",
        MACPOOL_ENGINE__MLX__PREFILL_STEP_SIZE="1024",
    )
    told = json.loads(done.stdout)
    origins = {row["key"]: (row["value"], row["origin"]) for row in told["settings"]}
    assert set(origins) == {one.key for kind in (CoordinatorSettings, NodeSettings) for one in list_settings(kind)}
    assert origins["engine.mlx.max_batch_size"] == (8, str(tmp_path / "config.toml"))
    assert origins["engine.mlx.prefill_step_size"] == (1024, "environment")
    assert origins["router.policy"] == ("most_headroom", "--set")
    assert origins["http.tls"] == ("auto", "default")
    assert origins["memory.cap"] == ("auto", "default"), "one that is wrong is not in force"
    assert origins["alerts.webhook_url"][0] == "https://hooks.example/…"
    assert "opensesame" not in done.output
    assert done.exit_code == 2
    assert len(told["wrong"]) == 5


def test_show_of_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    done = invoke(monkeypatch, "show", "cluster.", "--state", str(tmp_path))
    assert done.exit_code == 0
    assert done.output.splitlines()[0].split() == ["KEY", "VALUE", "ORIGIN"]
    assert "cluster.name" in done.output
    assert "memory" not in done.output
    assert invoke(monkeypatch, "show", "no.such", "--state", str(tmp_path)).exit_code == 5
    assert invoke(monkeypatch, "show", "--changed", "--state", str(tmp_path)).output.count("\n") == 1


def test_values_are_shown_as_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shown = dict[str, str]()
    for pair in ("models.folders=/srv/a b", "cluster.bonjour=false", "http.allowed_hosts=", "video.max_frames=9"):
        prefix = pair.partition("=")[0]
        done = invoke(monkeypatch, "show", prefix, "--state", str(tmp_path), "--set", pair)
        assert done.exit_code == 0, done.output
        shown[prefix] = done.output.splitlines()[1].removeprefix(prefix).rpartition("--set")[0].strip()
    assert shown == {
        "models.folders": '["/srv/a b"]',
        "cluster.bonjour": "false",
        "http.allowed_hosts": '""',
        "video.max_frames": "9",
    }


def test_config_show_running_needs_a_running_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    done = invoke(monkeypatch, "show", "--running", "--state", str(tmp_path))
    assert (done.exit_code, "neither a coordinator nor a node runs" in done.output) == (3, True)
    assert invoke(monkeypatch, "show", "--running", "--set", "a=b", "--state", str(tmp_path)).exit_code == 2


def test_running_settings_are_compared_with_the_file_except_overrides():
    flat = {"router.policy": "most_headroom", "http.drain_seconds": "9", "video.enabled": False}
    rows = build_setting_rows(
        resolve_layers(CoordinatorSettings, [("file", flat), ("--set", {"cluster.name": "lab"})], NODE_SECTIONS)
    )
    assert find_changed_settings(rows, CoordinatorSettings, flat, NODE_SECTIONS) == []
    found = find_changed_settings(
        rows, CoordinatorSettings, {"video.enabled": False, "http.drain_seconds": 9.0}, NODE_SECTIONS
    )
    assert [(one.key, one.running, one.now) for one in found] == [("router.policy", "most_headroom", "balanced")]
    given = find_changed_settings(rows, CoordinatorSettings, {**flat, "cluster.name": "home"}, NODE_SECTIONS)
    assert given == [], "a flag overrides the file"
    node = json.loads(
        json.dumps(
            build_setting_rows(
                resolve_layers(NodeSettings, [("file", {"models.preload": "a,b"})], COORDINATOR_SECTIONS)
            )
        )
    )
    assert find_changed_settings(node, NodeSettings, {"models.preload": ["a", "b"]}, COORDINATOR_SECTIONS) == [], (
        "JSON knows no tuples"
    )


def test_config_show_hides_secrets_in_urls():
    assert redact_value("alerts.webhook_url", "opensesame") == "(set, not shown)"
    assert [redact_value("alerts.webhook_url", text) for text in ("mailto:ann", "//h.example/x", "https://[bad/x")] == [
        "(set, not shown)"
    ] * 3
    assert redact_value("alerts.webhook_url", "") == ""
    assert redact_value("http.tls_key_file", "/etc/key.pem") == "/etc/key.pem"
    assert (
        redact_value("alerts.webhook_url", redact_value("alerts.webhook_url", "https://h.example/secret"))
        == "https://h.example/…"
    )
