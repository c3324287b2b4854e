"""Errors of the coordinator's API as exit codes of a command."""

import pytest

from coordinator.client.api_client import raise_for_status
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
