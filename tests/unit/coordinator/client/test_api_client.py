"""Errors of the coordinator's API as exit codes of a command."""

import socket
import threading
from pathlib import Path

import pytest

from coordinator.client.api_client import ApiSession, raise_for_status
from coordinator.client.errors import CommandError


@pytest.mark.parametrize(
    ("status", "code"), [(401, 4), (403, 4), (404, 5), (409, 6), (429, 6), (503, 6), (507, 6), (504, 7), (500, 1)]
)
def test_a_status_has_its_exit_code_and_the_message_of_the_body(status: int, code: int):
    with pytest.raises(CommandError) as caught:
        raise_for_status(status, b'{"error": {"message": "no node can get the model"}}')
    assert (caught.value.exit_code, caught.value.message) == (code, "no node can get the model")


def test_an_answer_without_an_error_is_quoted():
    with pytest.raises(CommandError, match=r"^HTTP 502: <html>$"):
        raise_for_status(502, b"<html>")


@pytest.mark.parametrize(
    ("response", "code", "words"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}", 3, "does not answer as HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>", 3, "does not answer with JSON"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{} wait", 7, "did not answer within"),
    ],
)
def test_a_response_that_breaks_off_is_a_clear_error(tmp_path: Path, response: bytes, code: int, words: str):
    key = tmp_path / "key"
    key.write_text("mp_key")
    answered = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(response)
                if b"wait" in response:
                    answered.wait(30)

        thread = threading.Thread(target=answer)
        thread.start()
        session = ApiSession(tmp_path, f"http://127.0.0.1:{listening.getsockname()[1]}", key, "text")
        try:
            with pytest.raises(CommandError, match=words) as caught:
                session.request_json("GET", "/api/v1/keys", timeout=0.5)
        finally:
            answered.set()
            thread.join()
    assert caught.value.exit_code == code
