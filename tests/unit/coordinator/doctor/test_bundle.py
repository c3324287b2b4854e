"""A bundle contains no secret and no prompt from any source, and all helpful facts."""

import fcntl
import json
import os
import platform
import stat
import tarfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from coordinator.cli import cluster
from coordinator.doctor import bundle
from coordinator.doctor.bundle import (
    OMITTED,
    find_own_events,
    parse_event,
    read_newest_lines,
    redact_settings,
    redact_value,
    render_log,
    write_bundle,
)
from host.redaction import HIDDEN
from node.inspect.running_settings import publish_settings
from node.settings import resolve_settings
from tests.support.cluster.whole_pool import served

ROOT = Path(__file__).parents[4]
PROMPT = "zebra-canary-7391 my secret diagnosis"
KEY = "mp_abcdefgh_" + "Q" * 43
TOKEN = "mpj1." + "a" * 52 + "." + "b" * 8 + "." + "c" * 26
PASSWORD = "opensesame-canary-5521"
PEM = "-----BEGIN PRIVATE KEY-----\nwalrus-canary-4410\n-----END PRIVATE KEY-----\n"
CANARIES = ("zebra-canary", "secret diagnosis", KEY, "Q" * 43, TOKEN, "a" * 52, PASSWORD, "walrus-canary")

EVENT = {"event": "link lost", "logger": "node.agent.agent", "level": "warning", "timestamp": "2026-11-20T10:00:00Z"}


def unpacked(file: Path) -> dict[str, str]:
    with tarfile.open(file) as archive:
        members = archive.getmembers()
        assert all(one.isfile() and one.mode == 0o600 and not one.name.startswith(("/", "..")) for one in members)
        return {one.name: archive.extractfile(one).read().decode() for one in members}  # pyright: ignore


@pytest.mark.parametrize(
    "where", ["prompt", "messages", "detail", "reason", "error", "anything", "node", "event", "logger"]
)
@pytest.mark.parametrize(
    "canary", [PROMPT, KEY, TOKEN, f"password={PASSWORD}", PEM, [PROMPT], {"deep": {"er": PROMPT}}]
)
def test_parse_event_omits_free_text_of_every_field(where: str, canary: Any):
    told = json.dumps(parse_event(json.dumps({**EVENT, where: canary})))
    assert [one for one in CANARIES if one in told] == []


def test_a_name_of_a_field_can_hold_nothing_either():
    assert PROMPT not in json.dumps(parse_event(json.dumps({**EVENT, PROMPT: 1})))


def test_parse_event_keeps_types_and_frames_of_an_exception_only():
    text = f"ValueError from KeyError: {PROMPT}\ntext.py:12 render\n{PROMPT}\nx.py:1 f {PROMPT}\nloop.py:3 step"
    found = parse_event(json.dumps({**EVENT, "exception": text}))
    assert found is not None
    assert found["exception"] == "ValueError\ntext.py:12 render\nloop.py:3 step".replace(
        "ValueError", "ValueError from KeyError"
    )
    assert parse_event(json.dumps({**EVENT, "exception": f"{PROMPT}: x"}))["exception"] == OMITTED  # pyright: ignore


def test_parse_event_keeps_numbers_booleans_and_known_words():
    line = {**EVENT, "predicted": 12_000_000, "armed": True, "bound_by": "dynamic", "skew": -0.25, "left": None}
    assert parse_event(json.dumps(line)) == line


def test_parse_event_omits_event_names_of_libraries():
    for logger, name in (
        ("httpx", OMITTED),
        ("uvicorn.error", OMITTED),
        ("nodes.x", OMITTED),
        *((f"{package}.x", "link lost") for package in ("coordinator", "node", "router", "host", "wire")),
    ):
        line = parse_event(json.dumps({**EVENT, "logger": logger, "event": "link lost"}))
        assert (line or {})["event"] == name, logger


def test_lines_of_other_formats_are_counted():
    lines = [
        json.dumps(EVENT),
        PROMPT,
        "[]",
        '{"event": ' + "[" * 100_000,
        f"2026-11-20 10:00:00 [warning  ] certificate renewed  text={PROMPT}",
        f"2026-11-20 10:00:00 [warning  ] {PROMPT}!",
    ]
    found = [json.loads(line) for line in render_log(lines).splitlines()]
    assert [one.get("event") for one in found] == ["link lost", "certificate renewed", None]
    assert found[-1] == {"lines_left_out": 4}


@given(st.text(max_size=80), st.dictionaries(st.text(max_size=12), st.text(max_size=60), max_size=4))
def test_parse_event_keeps_single_words_only(line: str, fields: dict[str, str]):
    parse_event(line)
    for name, value in (parse_event(json.dumps({**EVENT, **fields})) or {}).items():
        assert name in EVENT or name in fields
        assert value is None or len(str(value)) <= 400
        assert " " not in str(value) or name in ("event", "exception") or value in (OMITTED, "[hidden]")


def planted(state: Path) -> None:
    """Write a canary into every file of a state folder."""
    for name in (
        "pepper",
        "authority/authority.pem",
        "authority/coordinator.pem",
        "node/identity/node.pem",
        "node/identity/identity.json",
        "node/video/ray/token",
        "cluster.db",
    ):
        (state / name).parent.mkdir(parents=True, exist_ok=True)
        (state / name).write_text(PEM + KEY + TOKEN + PROMPT)
        (state / name).chmod(0o600)
    (state / "logs").mkdir()
    lines = [
        json.dumps({**EVENT, "detail": PROMPT, "n": 1}),
        json.dumps({**EVENT, "event": PROMPT, "key": KEY}),
        PROMPT,
        KEY,
    ]
    for log in ("coordinator.log", "node.log", "engine.log", "ray.log", "service.log", "other.log"):
        (state / "logs" / log).write_text("\n".join(lines) + "\n")
    hook = f"https://hooks.example/{PASSWORD}?t={PASSWORD}"
    (state / "config.toml").write_text(f'[alerts]\nwebhook_url = "{hook}"\n[router]\nunknown = "{PASSWORD}"\n')


def test_bundle_of_a_pool_has_exactly_the_documented_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in os.environ if name.startswith("MACPOOL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    state, file, old = tmp_path / "state", tmp_path / "bundle.tgz", os.umask(0)
    try:
        state.mkdir()
        planted(state)
        running = resolve_settings([("--set", {"node.name": PROMPT, "memory.cap": "9GiB"})])
        with (
            (state / "node" / "lock").open("w") as lock,
            publish_settings(state / "node", 7, running),
            served() as pool,
        ):
            fcntl.flock(lock, fcntl.LOCK_EX)
            lock.write("7")
            lock.flush()
            (tmp_path / "key").write_text(pool.keys["admin"])
            arguments = ["--state", str(state), "--url", pool.url, "--key-file", str(tmp_path / "key")]
            done = CliRunner().invoke(
                cluster, ["doctor", *arguments, "--json", "--seconds", "50", "--bundle", str(file)]
            )
            secrets = (*CANARIES, *pool.keys.values())
    finally:
        os.umask(old)
    told = json.loads(done.stdout)
    assert told["schema"] == 1
    assert told["exit"] == done.exit_code == 6  # the identity is damaged, and the settings are wrong
    by_id = {one["id"]: one for one in told["checks"]}
    assert (by_id["coordinator"]["result"], by_id["settings"]["result"]) == ("ok", "fail"), by_id["settings"]
    assert "router.unknown" in by_id["settings"]["text"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    parts = unpacked(file)
    assert {name.removeprefix("macpool-doctor/") for name in parts} == {
        "README.txt",
        "findings.json",
        "versions.json",
        "settings.json",
        "running.json",
        "conditions.json",
        "nodes.json",
        "logs/coordinator.log",
        "logs/node.log",
        "logs/engine.log",
        "logs/ray.log",
        "logs/service.log",
    }
    whole = done.output + "".join(parts.values())
    assert [one for one in secrets if one in whole] == []
    settings = json.loads(parts["macpool-doctor/settings.json"])
    assert "hooks.example" in settings["alerts.webhook_url"]["value"]
    assert settings["memory.cap"]["origin"] == "default"
    now = json.loads(parts["macpool-doctor/running.json"])["settings"]
    assert (now["node.name"]["origin"], now["memory.cap"]["value"]) == ("--set", "9GiB")
    assert json.loads(parts["macpool-doctor/nodes.json"])["schema"] == 1
    assert "conditions" in json.loads(parts["macpool-doctor/conditions.json"])
    versions = json.loads(parts["macpool-doctor/versions.json"])
    assert (versions["macpool"], versions["coordinator"]["version"]) == (version("macpool"), "0")
    assert versions["python"] == platform.python_version()
    assert "memory" in versions["hardware"]
    assert "installed" in versions["device"]
    assert '"event": "link lost"' in parts["macpool-doctor/logs/node.log"]


def test_write_bundle_replaces_a_file_and_follows_no_link(tmp_path: Path):
    (tmp_path / "secret").write_text("mine")
    (tmp_path / "b.tgz").symlink_to(tmp_path / "secret")
    content = {"n": 1, "name": "Jürgens Mac", "folder": Path("/srv/models")}
    write_bundle(tmp_path / "b.tgz", {"a.json": content}, [], tmp_path)
    read = json.loads(unpacked(tmp_path / "b.tgz")["macpool-doctor/a.json"])
    assert read == {"n": 1, "name": "Jürgens Mac", "folder": "/srv/models"}
    assert (tmp_path / "secret").read_text() == "mine"
    assert not (tmp_path / "b.tgz").is_symlink()
    assert "~/models" in unpacked_text(tmp_path)


def unpacked_text(folder: Path) -> str:
    write_bundle(folder / "b.tgz", {"a.json": {"folder": f"{folder}/models"}}, [], folder)
    return "".join(unpacked(folder / "b.tgz").values())


def test_own_events_are_those_that_our_packages_log():
    find_own_events.cache_clear()
    found = find_own_events()
    assert {"endpoint certificate", "metal limit not stored", "link lost"} <= found
    assert "zebra canary" not in found


def test_parse_event_keeps_words_in_known_fields_only():
    assert parse_event(json.dumps({**EVENT, "reason": "zebra", "detail": "zebra"})) == {
        **EVENT,
        "reason": "zebra",
        "detail": OMITTED,
    }
    assert parse_event(json.dumps({**EVENT, "exception": ""})) == {**EVENT, "exception": OMITTED}


def test_render_log_keeps_the_newest_events_and_counts_the_rest(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bundle, "MAX_LINES", 2)
    console = "2026-11-20 10:00:00 [warning  ] certificate renewed  text=x"
    lines = [json.dumps({**EVENT, "n": number}) for number in range(4)]
    found = [
        json.loads(line)
        for line in render_log([PROMPT, *lines, console, console.replace("renewed", "zebra")]).splitlines()
    ]
    assert found == [
        {**EVENT, "n": 3},
        {"timestamp": "2026-11-20 10:00:00", "level": "warning", "event": "certificate renewed"},
        {"lines_left_out": 5},
    ]


def test_read_newest_lines_begins_with_a_whole_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    log = tmp_path / "node.log"
    assert read_newest_lines(log) == []
    log.write_text("0123456789abcde\n" * 2**16)
    assert len(read_newest_lines(log)) == 2**15 - 1, "512 KiB of lines with 16 bytes, without the first one"
    monkeypatch.setattr(bundle, "MAX_LOG_BYTES", 20)
    for text, lines in (
        ("a\nb\n", ["a", "b"]),
        ("0123456789\nabcdefgh\n", ["0123456789", "abcdefgh"]),
        ("x" * 30 + "\nabcdefgh\n", ["abcdefgh"]),
    ):
        log.write_text(text)
        assert read_newest_lines(log) == lines


def test_secrets_and_the_home_folder_are_hidden_anywhere_in_a_value():
    value = {"paths": ["/srv/ann/models", ("/srv/ann", 1)], "password": "x", "n": 1, "deep": {"key": KEY}}
    assert redact_value(value, "/srv/ann") == {
        "paths": ["~/models", ["~", 1]],
        "password": HIDDEN,
        "n": 1,
        "deep": {"key": HIDDEN},
    }
    assert [redact_value("/a/b", home) for home in ("/", "")] == ["/a/b", "/a/b"]
    for text in (KEY, TOKEN, f"the key {KEY} is unknown", f"password={PASSWORD}"):
        assert [canary for canary in CANARIES if canary in str(redact_value([text, {"text": (text,)}], "/srv"))] == []


def test_redact_settings_keeps_plain_words():
    values = ("", "auto", "~/models:80%", "a secret text", ["a", "b c"], ("x",), 7, None)
    rows = [{"key": str(number), "value": value, "origin": "default"} for number, value in enumerate(values)]
    assert [one["value"] for one in redact_settings(rows).values()] == [
        "",
        "auto",
        "~/models:80%",
        HIDDEN,
        ["a", HIDDEN],
        ["x"],
        7,
        None,
    ]
    assert redact_settings(rows[1:2]) == {"1": {"value": "auto", "origin": "default"}}


def test_redact_settings_hides_texts_in_tables():
    upstreams = {"big": {"url": "https://api.test/v1?key=abc", "model": "m", "note": "a secret text"}, "b c": ["x y"]}
    (row,) = redact_settings([{"key": "upstreams", "value": upstreams, "origin": "default"}]).values()
    assert row["value"] == {"big": {"url": HIDDEN, "model": "m", "note": HIDDEN}, HIDDEN: [HIDDEN]}


def test_write_bundle_returns_the_names_of_its_files(tmp_path: Path):
    (tmp_path / "node.log").write_text(json.dumps(EVENT))
    logs = [tmp_path / "node.log", tmp_path / "gone.log"]
    assert write_bundle(tmp_path / "b.tgz", {"a.json": {}}, logs, tmp_path) == ["README.txt", "a.json", "logs/node.log"]
