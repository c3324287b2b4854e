"""Refusals of the hub as sentences."""

import pytest

from node.hub.errors import describe_refusal
from wire.frames.model_files import ModelOrderCode


@pytest.mark.parametrize(
    ("status", "error_code", "has_token", "code", "text"),
    [
        (401, "GatedRepo", False, ModelOrderCode.GATED, "a/b is gated: it needs a token"),
        (403, "GatedRepo", True, ModelOrderCode.GATED, "accept its terms"),
        (401, "RepoNotFound", False, ModelOrderCode.NOT_FOUND, "private and needs a token"),
        (404, "RepoNotFound", True, ModelOrderCode.NOT_FOUND, "the token may not read it"),
        (404, "", True, ModelOrderCode.NOT_FOUND, "a/b does not exist, or the token may not read it: check the name"),
        (404, "", False, ModelOrderCode.NOT_FOUND, "a/b does not exist, or it is private and needs a token: check"),
        (404, "RevisionNotFound", True, ModelOrderCode.NOT_FOUND, "check its revision"),
        (404, "EntryNotFound", False, ModelOrderCode.NOT_FOUND, "file names"),
        (401, "", True, ModelOrderCode.GATED, "refuses the token"),
        (403, "", False, ModelOrderCode.GATED, "needs a token"),
    ],
)
def test_describe_refusal_names_cause_and_next_step(
    status: int, error_code: str, has_token: bool, code: ModelOrderCode, text: str
):
    error = describe_refusal(status, error_code, "a/b", has_token=has_token)
    assert error is not None
    assert error.code == code
    assert text in error.message


@pytest.mark.parametrize("status", [200, 206, 429, 500, 503])
def test_describe_refusal_ignores_other_statuses(status: int):
    assert describe_refusal(status, "", "a/b", has_token=False) is None


@pytest.mark.parametrize("status", [404, 410])
def test_describe_refusal_takes_a_removed_file_for_a_missing_one(status: int):
    error = describe_refusal(status, "EntryNotFound", "x of a/b", has_token=False)
    assert error is not None
    assert (error.code, error.retry_after) == (ModelOrderCode.NOT_FOUND, 0.0)
    assert error.message == str(error) == "x of a/b does not exist: check its revision and file names"
