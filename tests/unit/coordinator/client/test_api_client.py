"""Errors of the coordinator's API as exit codes of a command."""

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

from coordinator.client.api_client import RESTART_SECONDS, ApiSession, raise_for_status
from coordinator.client.connection import CoordinatorAddress
from coordinator.client.errors import DENIED, TIMED_OUT, UNREACHABLE, CommandError


@pytest.mark.parametrize(
    ("status", "code"), [(401, 4), (403, 4), (404, 5), (409, 6), (429, 6), (503, 6), (507, 6), (504, 7), (500, 1)]
)
def test_a_status_has_its_exit_code_and_the_message_of_the_body(status: int, code: int):
    with pytest.raises(CommandError) as caught:
        raise_for_status(status, b'{"error": {"message": "no node can get the model"}}')
    assert (caught.value.exit_code, caught.value.message) == (code, "no node can get the model")


def test_a_request_that_never_fits_is_refused_with_the_numbers_of_its_memory():
    sizes = ("estimate", "headroom", "ceiling", "current", "reserved", "margin", "cap")
    memory = {size: number * 2**30 for number, size in enumerate(sizes, 1)}
    body = json.dumps({"error": {"message": "needs 43.5 GiB", "memory": memory}}).encode()
    with pytest.raises(CommandError) as caught:
        raise_for_status(400, body)
    assert caught.value.exit_code == 6
    assert caught.value.message == (
        "needs 43.5 GiB\n(estimate 1.0 GiB, headroom 2.0 GiB, ceiling 3.0 GiB, current 4.0 GiB, reserved 5.0 GiB, "
        "margin 6.0 GiB, cap 7.0 GiB)"
    )
    with pytest.raises(CommandError) as caught:
        raise_for_status(400, b'{"error": {"message": "n is no number"}}')
    assert caught.value.exit_code == 1


def test_an_error_without_numbers_is_its_message_alone():
    for memory in ("null", "{}"):
        with pytest.raises(CommandError) as caught:
            raise_for_status(507, b'{"error": {"message": "no node has room", "memory": ' + memory.encode() + b"}}")
        assert (caught.value.exit_code, caught.value.message) == (6, "no node has room")


def test_an_answer_without_an_error_is_quoted():
    with pytest.raises(CommandError, match=r"^HTTP 502: <html>$"):
        raise_for_status(502, b"<html>")


@pytest.mark.parametrize(("name", "fields"), [("run.json", "secret and url"), ("login.json", "key and url")])
@pytest.mark.parametrize("content", ["[]", "{}", '{"url": "http://127.0.0.1:1"}', "7"])
def test_a_file_without_a_required_field_is_named_with_the_next_step(
    tmp_path: Path, name: str, fields: str, content: str
):
    (tmp_path / name).write_text(content)
    with pytest.raises(CommandError) as caught:
        ApiSession(tmp_path, None, None, "text").select_coordinator()
    assert (caught.value.exit_code, caught.value.message) == (1, f"{tmp_path / name} has no {fields}: delete the file")


@pytest.mark.parametrize("name", ["run.json", "login.json"])
def test_a_file_that_cannot_be_read_is_named_with_the_next_step(tmp_path: Path, name: str):
    session = ApiSession(tmp_path, None, None, "text")
    for step, damage in (
        ("delete the file", lambda: (tmp_path / name).write_text("{")),
        ("check the owner and the mode of the file", (tmp_path / name).mkdir),
    ):
        damage()
        with pytest.raises(CommandError) as caught:
            session.select_coordinator()
        message = caught.value.message
        assert caught.value.exit_code == 1
        assert message.startswith(f"{tmp_path / name} cannot be read: ")
        assert message.endswith(f": {step}")
        if (tmp_path / name).is_file():
            (tmp_path / name).unlink()


@pytest.mark.parametrize("content", [b"mp_a\nmp_b\n", "schlüssel".encode(), b"\xff", b"mp_a\x07"])
def test_a_key_file_has_one_key(tmp_path: Path, content: bytes):
    key = tmp_path / "key"
    key.write_bytes(content)
    with pytest.raises(CommandError, match="must contain one key and nothing else") as caught:
        ApiSession(tmp_path, "http://127.0.0.1:1", key, "text").select_coordinator()
    assert caught.value.exit_code == DENIED


def test_the_coordinator_of_the_state_folder_comes_before_a_login(tmp_path: Path):
    (tmp_path / "login.json").write_text(json.dumps({"url": "https://studio:8080", "key": "mp_a", "ca": "theirs"}))
    session = ApiSession(tmp_path, None, None, "text")
    assert session.select_coordinator() == CoordinatorAddress("https://studio:8080", "mp_a", "theirs")
    for ca, authority in ((None, ""), ("ours", "ours")):
        (tmp_path / "run.json").write_text(json.dumps({"url": "https://127.0.0.1:1", "secret": "mp_b", "ca": ca}))
        assert session.select_coordinator() == CoordinatorAddress("https://127.0.0.1:1", "mp_b", authority)


def test_a_url_uses_the_login_only_if_it_is_the_same(tmp_path: Path):
    (tmp_path / "login.json").write_text(json.dumps({"url": "https://studio:8080", "key": "mp_a", "ca": "theirs"}))
    same = ApiSession(tmp_path, "studio:8080/v1", None, "text")
    assert same.select_coordinator() == CoordinatorAddress("https://studio:8080", "mp_a", "theirs")
    with pytest.raises(CommandError, match="--url needs --key-file"):
        ApiSession(tmp_path, "https://mini:8080", None, "text").select_coordinator()
    key = tmp_path / "key"
    key.write_text("mp_c\n")
    other = ApiSession(tmp_path, "https://mini:8080", key, "text")
    assert other.select_coordinator() == CoordinatorAddress("https://mini:8080", "mp_c", "")


@pytest.mark.parametrize(("error", "crashed"), [(None, False), (PermissionError, False), (ProcessLookupError, True)])
def test_a_coordinator_whose_process_is_gone_has_crashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[OSError] | None, crashed: bool
):
    def kill(process: int, number: int) -> None:
        assert (process, number) == (77, 0)
        if error is not None:
            raise error

    monkeypatch.setattr("os.kill", kill)
    session = ApiSession(tmp_path, None, None, "text")
    assert not session.has_crashed
    run = {"url": "http://127.0.0.1:1", "secret": "mp_b"}
    for pid, expected in ((77, crashed), ("77", False), (None, False)):
        (tmp_path / "run.json").write_text(json.dumps(run | {"pid": pid}))
        assert session.has_crashed is expected
    (tmp_path / "run.json").write_text(json.dumps(run | {"pid": 77}))
    assert not ApiSession(tmp_path, "http://127.0.0.1:1", None, "text").has_crashed
    assert session.select_coordinator().key == "mp_b"
    (tmp_path / "login.json").write_text(json.dumps({"url": "https://studio:8080", "key": "mp_a"}))
    assert session.select_coordinator().key == ("mp_a" if crashed else "mp_b")


class Restarting(ApiSession):
    """A session whose coordinator fails some requests with an exit code, and then answers."""

    codes: ClassVar[list[int]] = []

    def request_json(self, method: str, path: str, body: object = None, timeout: float = 30.0) -> dict[str, Any]:
        if self.codes:
            raise CommandError(self.codes.pop(0), "it fails")
        return {"path": path}


@pytest.mark.parametrize(
    ("codes", "seconds", "expected"),
    [
        ([UNREACHABLE] * 2, 60.0, None),
        ([UNREACHABLE], 0.0, UNREACHABLE),
        ([TIMED_OUT], 60.0, TIMED_OUT),
        ([DENIED], 60.0, DENIED),
    ],
)
def test_a_waiting_command_repeats_its_request_only_while_the_coordinator_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codes: list[int], seconds: float, expected: int | None
):
    monkeypatch.setattr("coordinator.client.api_client.RESTART_POLL_SECONDS", 0.0)
    Restarting.codes[:] = codes
    session = Restarting(tmp_path, None, None, "text")
    if expected is None:
        assert session.poll_json("/api/v1/pulls", seconds) == {"path": "/api/v1/pulls"}
        return
    with pytest.raises(CommandError) as caught:
        session.poll_json("/api/v1/pulls", seconds)
    assert (caught.value.exit_code, Restarting.codes) == (expected, [])


def test_a_restart_of_the_coordinator_may_take_a_minute():
    assert RESTART_SECONDS == 60.0
