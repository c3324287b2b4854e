"""Secrets that must not be in a log, found by the name of the field, by their form, and by the origin of an
exception."""

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from host import log_setup
from host.log_dedup import BURST_EVENTS, MAX_SUBJECTS, WINDOW_SECONDS, LogDeduplicator
from host.redaction import (
    HIDDEN,
    MAX_MESSAGE_CHARS,
    format_exception,
    hide_secrets,
    hide_secrets_in_line,
    redact_fields,
)
from router.admission.api_keys import new_key
from wire.join_token import new_token

PROMPT = "canary prompt about my diagnosis"
KEY = new_key(b"pepper", "x", ["infer"], created=0.0)[1]


TOKEN = str(new_token(b"ca"))


# forms of secrets


@pytest.mark.parametrize(
    "secret",
    [
        KEY,
        "sk-proj-abcdefghijklmnopqrstuvwxyz",
        "hf_abcdefghijklmnopqrstuvwxyz",
        "ghp_abcdefghijklmnopqrstuvwxyz01",
        "-----BEGIN PRIVATE KEY-----\nMIGHAgEAMBMGByq\n-----END PRIVATE KEY-----",
        TOKEN,
        "-----BEGIN EC PRIVATE KEY-----\nMIGHAg\n-----END EC PRIVATE KEY-----",
        "gho_abcdefghijklmnopqrstuvwxyz01",
    ],
    ids=["ours", "openai", "huggingface", "github", "pem", "join", "pem of a curve", "github's of an app"],
)
def test_what_looks_like_a_secret_is_hidden(secret: str):
    told = hide_secrets(f"before {secret} after")
    assert told == f"before {HIDDEN} after"


@pytest.mark.parametrize(
    ("line", "left"),
    [
        ("Authorization: Bearer abcdef123456", "Authorization: Bearer " + HIDDEN),
        ("authorization=Basic dXNlcjpwYXNz", "authorization=Basic " + HIDDEN),
        ('{"x-api-key": "abcdef123"}', '{"x-api-key": "' + HIDDEN + '"}'),
        ("{'password': 'hunter22'}", "{'password': '" + HIDDEN + "'}"),
        ("GET /x?api_key=abcdef1234 HTTP/1.1", "GET /x?api_key=" + HIDDEN + " HTTP/1.1"),
    ],
)
def test_what_is_called_a_secret_is_hidden(line: str, left: str):
    assert hide_secrets_in_line(line) == left


def test_a_line_of_json_stays_one():
    event = {"a": f"Bearer {KEY}", "b": "password: hunter22", "secret": "x", "c": '{"api_key": "abcdef99"}'}
    line = hide_secrets_in_line(json.dumps(redact_fields(event)))
    assert set(json.loads(line)) == {"a", "b", "secret", "c"}
    for secret in (KEY, "hunter22", "abcdef99"):
        assert secret not in line


@given(st.text(max_size=200))
def test_hiding_twice_is_hiding_once(text: str):
    assert hide_secrets_in_line(hide_secrets_in_line(text)) == hide_secrets_in_line(text)


@given(st.dictionaries(st.text(max_size=5), st.text(max_size=50)))
def test_any_line_of_json_stays_one(event: dict[str, str]):
    assert isinstance(json.loads(hide_secrets_in_line(json.dumps(event))), dict)


def test_fields_are_hidden_at_any_depth():
    event = {"event": "x", "messages": [PROMPT], "body": {"a": 1}, "deep": [{"prompt": PROMPT, "n": 1}], "Api-Key": "k"}
    told = redact_fields(event)
    assert PROMPT not in repr(told)
    assert told["deep"] == [{"prompt": HIDDEN, "n": 1}]
    assert told["Api-Key"] == HIDDEN


def fail(message: str) -> None:
    raise ValueError(message)


def broken(private: bool) -> str:
    prompt = PROMPT
    try:
        fail(f"cannot read {KEY} in {prompt}")
    except ValueError as error:
        return format_exception((type(error), error, error.__traceback__), private=private)
    raise AssertionError("nothing failed")


def test_an_exception_has_its_cause_its_lines_and_a_bounded_message():
    told = hidden = ""
    try:
        try:
            fail("first")
        except ValueError as error:
            raise KeyError("a \n  b" + "x" * 400) from error
    except KeyError as error:
        told = format_exception((type(error), error, error.__traceback__), private=False)
        hidden = format_exception((type(error), error, None), private=True)
    message, where = told.split("\n")
    assert message == "KeyError from ValueError: " + ("'a \\n b" + "x" * 400)[:300]
    assert re.fullmatch(r"test_redaction\.py:\d+ test_an_exception_\w+", where)
    assert hidden == "KeyError from ValueError: [hidden]\n"


def test_no_part_of_a_secret_is_left_at_the_end_of_a_long_message():
    error = ValueError("x" * (MAX_MESSAGE_CHARS - 9) + " " + KEY)
    assert KEY[:5] not in format_exception((ValueError, error, None), private=False)


@pytest.mark.parametrize("event", ["prepare", "grammar", "text"])
def test_no_message_is_kept_of_an_exception_about_a_clients_text(log_file: Path, event: str):
    try:
        fail(PROMPT)
    except ValueError:
        structlog.get_logger("test").exception(event)
    assert PROMPT not in log_file.read_text()


def test_a_private_key_that_is_cut_off_is_hidden_to_the_end():
    assert hide_secrets("see -----BEGIN PRIVATE KEY-----\nMIGHAg\nMEYC") == f"see {HIDDEN}"


def test_every_name_of_a_secret_or_a_prompt_is_hidden_and_other_values_stay():
    for name in (
        "authorization",
        "api_key",
        "apikey",
        "key",
        "secret",
        "token_text",
        "cookie",
        "set-cookie",
        "Password",
        "pepper",
        "prompt",
        "prompts",
        "messages",
        "content",
        "input",
        "text",
        "texts",
        "ids",
        "image_url",
        "tools",
        "body",
    ):
        assert redact_fields({name: 1}) == {name: HIDDEN}
    event = {"n": 1, "list": ["a", ("b", {"c": None})], "map": {1: {"key": "k"}}, "note": f"by {KEY}"}
    told = {"n": 1, "list": ["a", ["b", {"c": None}]], "map": {"1": {"key": HIDDEN}}, "note": f"by {HIDDEN}"}
    assert redact_fields(event) == told


def test_an_exception_has_no_values_and_no_code():
    told = broken(private=False)
    assert told.startswith("ValueError: cannot read [hidden] in")
    assert "broken" in told
    assert "prompt = PROMPT" not in told
    assert PROMPT not in broken(private=True)


# the journal


@pytest.fixture
def log_file(tmp_path: Path) -> Iterator[Path]:
    before, level = logging.root.handlers[:], logging.root.level
    file = tmp_path / "logs" / "x.log"
    log_setup.open_journal(file, "info")
    yield file
    for handler in logging.root.handlers:
        handler.close()
    logging.root.handlers[:] = before
    logging.root.setLevel(level)
    structlog.reset_defaults()


def lines(file: Path) -> list[dict[str, object]]:
    for handler in logging.root.handlers:
        handler.flush()
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_no_process_logs_a_secret_or_a_prompt(log_file: Path, capsys: pytest.CaptureFixture[str]):
    log = structlog.get_logger("test")
    token = TOKEN
    log.warning("asked", messages=[{"content": PROMPT}], header=f"Bearer {KEY}", nested={"prompt": PROMPT}, token=token)
    logging.getLogger("library").warning("request %s with %s", {"authorization": f"Bearer {KEY}"}, token)
    try:
        fail(f"no {PROMPT} with {KEY}")
    except ValueError:
        log.exception("prepare", request=7, request_id="r-1")
    try:
        fail(f"no way with {KEY}")
    except ValueError:
        logging.getLogger("library").exception("failed with %s", KEY)
    told = lines(log_file)
    assert len(told) == 4
    screen = capsys.readouterr().err
    for text in (log_file.read_text(), screen):
        for secret in (PROMPT, KEY, token):
            assert secret not in text
    assert told[2]["request_id"] == "r-1"
    assert "ValueError" in str(told[2]["exception"])


def test_a_log_is_private_and_bounded(log_file: Path, monkeypatch: pytest.MonkeyPatch):
    handler = logging.root.handlers[0]
    monkeypatch.setattr(handler, "maxBytes", 2000)
    log = structlog.get_logger("test")
    for number in range(200):
        log.info("event", number=number, reason=str(number))
    files = sorted(log_file.parent.iterdir())
    assert len(files) == log_setup.MAX_LOG_FILES + 1
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files)
    assert all(file.stat().st_size <= 2200 for file in files)


def test_a_flood_is_logged_as_a_number(log_file: Path, monkeypatch: pytest.MonkeyPatch):
    now = [1000.0]
    monkeypatch.setattr(log_setup.time, "monotonic", lambda: now[0])
    log = structlog.get_logger("test")
    for _ in range(1000):
        log.warning("denied", peer="10.0.0.9")
    log.warning("denied", peer="10.0.0.10")
    now[0] += WINDOW_SECONDS
    log.warning("denied", peer="10.0.0.9")
    told = lines(log_file)
    assert len(told) == BURST_EVENTS + 2
    assert [line.get("left_out") for line in told] == [None] * (BURST_EVENTS + 1) + [1000 - BURST_EVENTS]


def test_events_are_distinguished_by_their_beginning(log_file: Path):
    log = structlog.get_logger("test")
    for number in range(BURST_EVENTS + 1):
        log.info(f"event {number}")
        log.info("x" * 200 + str(number))
    assert len(lines(log_file)) == 2 * BURST_EVENTS + 1


# repeats


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 10)), max_size=200))
def test_every_event_is_admitted_or_counted(events: list[tuple[str, float]]):
    repeats, now, told, left_out = LogDeduplicator(), 0.0, 0, 0
    for event, pause in events:
        now += pause
        found = repeats.admit("x", event, {}, now)
        told += found is not None
        left_out += found or 0
    assert told + left_out + repeats.left_out == len(events)


def test_many_addresses_fill_no_memory():
    repeats = LogDeduplicator()
    for number in range(10 * MAX_SUBJECTS):
        repeats.admit("x", "denied", {"peer": str(number)}, 0.0)
    assert repeats.subjects <= MAX_SUBJECTS + 1
