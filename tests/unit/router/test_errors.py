import json

import pytest

from router.errors import (
    NO_KEY,
    Problem,
    build_invalid,
    build_wrong_method,
    from_failure,
    from_refused,
    round_retry_seconds,
)
from wire.refusals import STATUS, FailureCode, MemoryNumbers, RefusalCode, Refused

NUMBERS = MemoryNumbers(30, 20, 10, 1, 5, 2, 24, 7, "static")


def error(problem: Problem) -> dict[str, object]:
    return json.loads(problem.encode_body("r-1"))["error"]


@pytest.mark.parametrize("code", list(RefusalCode))
def test_every_refusal_has_its_status_and_openai_shape(code: RefusalCode):
    problem = from_refused(Refused(code, "why", NUMBERS, None))
    assert problem.status == STATUS[code]
    found = error(problem)
    assert (found["code"], found["message"], found["request_id"]) == (code.value, "why", "r-1")
    assert found["type"] in {"invalid_request_error", "permission_error", "rate_limit_error", "server_error"}
    assert found["memory"] == {
        "predicted": 30,
        "ceiling": 20,
        "current": 10,
        "reserved": 1,
        "estimate": 5,
        "margin": 2,
        "cap": 24,
        "headroom": 7,
        "bound_by": "static",
    }
    assert (b"retry-after", b"1") in problem.build_headers() or problem.status in (400, 403, 404, 409, 500)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (RefusalCode.IN_USE, "invalid_request_error"),
        (RefusalCode.LOAD_FAILED, "server_error"),
    ],
)
def test_permanent_problem_has_no_retry_time_and_should_retry_false(code: RefusalCode, kind: str):
    problem = from_refused(Refused(code, "why", None, 5.0))
    assert error(problem)["type"] == kind
    assert problem.build_headers() == [(b"x-should-retry", b"false")]


def test_crashed_request_has_should_retry_false():
    assert from_failure("engine_crashed", "x").build_headers() == [(b"x-should-retry", b"false")]
    assert from_failure("node_lost", "x").build_headers() == []


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0, 1),
        (0.2, 1),
        (1.0, 1),
        (1.1, 2),
        (59.5, 60),
        (1e9, 60),
        (float("nan"), 60),
        (-3.0, 1),
    ],
)
def test_retry_after_is_a_whole_number_that_clients_honour(seconds: float, shown: int):
    assert round_retry_seconds(seconds) == shown


def test_failure_is_a_5xx_status():
    assert from_failure("engine_crashed", "x").status == 500
    assert from_failure("node_lost", "x").status == 502
    assert from_failure("anything else", "x").status == 500
    assert error(from_failure("node_lost", "x"))["type"] == "server_error"
    assert "memory" not in error(from_failure("node_lost", "x"))


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (FailureCode.NODE_LOST, 502),
        (FailureCode.LINK_LOST, 502),
        (FailureCode.UPSTREAM_FAILED, 502),
        (FailureCode.ENGINE_CRASHED, 500),
        (FailureCode.ENGINE_ERROR, 500),
        (FailureCode.ROUTER_ERROR, 500),
        (FailureCode.SLOW_CLIENT, 408),
        (FailureCode.COMMAND_TIMEOUT, 504),
        (FailureCode.GRAMMAR_FAILED, 400),
    ],
)
def test_a_failure_has_the_status_of_its_cause_and_no_retry_time(code: FailureCode, status: int):
    problem = from_failure(code, "x")
    assert (problem.status, problem.code, problem.retry_after) == (status, code, None)


@pytest.mark.parametrize("code", ["memory_pressure", "no_headroom", "node_stopping", "shutting_down"])
def test_a_failure_that_passes_is_a_503_that_clients_retry(code: str):
    problem = from_failure(code, "x")
    assert (problem.status, problem.build_headers()) == (503, [(b"retry-after", b"1")])


def test_the_event_form_is_one_line_of_data():
    event = from_failure("node_lost", "line\nbreak").encode_event("r")
    assert event.startswith(b'data: {"error":')
    assert event.endswith(b"}\n\n")
    assert event.count(b"\n") == 2


def test_some_problems_have_headers_of_their_own():
    assert build_wrong_method("PUT", "GET, HEAD").build_headers() == [(b"allow", b"GET, HEAD")]
    assert NO_KEY.build_headers() == [(b"www-authenticate", b"Bearer")]
    assert error(build_invalid("no", "n"))["param"] == "n"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "server_error"),
        (503, "server_error"),
    ],
)
def test_the_type_of_an_error_follows_its_status(status: int, kind: str):
    assert error(Problem(status, "code", "text"))["type"] == kind
