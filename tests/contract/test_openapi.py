"""The OpenAPI document against the complete application on loopback nodes.

For any request, valid or not, the document describes the answer (status, content type, body). No answer is an internal
error.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import requests
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from coordinator.http import ambiguous_heads
from coordinator.http.http_protocol import HEAD_TOO_LONG
from coordinator.http.origin_check import OriginCheck
from router.errors import Problem
from tests.effort import SEED, thin_cases
from tests.support.cluster import whole_pool
from tests.support.cluster.whole_pool import OPERATIONS, Served

OURS = {501, 503}
"""Answers above 499 that are no internal error: not offered, and no room or no node."""
TRUE = {"true", "1", "on", "t", "y", "yes"}
"""Values that the API reads as true."""
EXAMPLES = 4
"""Examples of each kind for every operation, bounded to limit the duration of the suite."""
EVERY_CHECK: Any = list(HealthCheck)
"""Health checks of Hypothesis, all of which are suppressed."""


def validate(case: Any, answer: requests.Response) -> None:
    """Compare status, content type and body of an answer with the document."""
    from schemathesis.specs.openapi import checks

    held = [checks.status_code_conformance, checks.content_type_conformance, checks.response_schema_conformance]
    case.validate_response(answer, checks=held)


def find_operation(served: Served, path: str, method: str) -> Any:
    """Return an operation of the document. The import takes 1 s of CPU in every worker."""
    import schemathesis

    return schemathesis.openapi.from_dict(served.document)[path][method]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with whole_pool.served(queue_timeout_seconds=0.2, body_timeout_seconds=5.0) as one:
        yield one


def test_every_operation_is_tried(served: Served):
    described = {f"{m.upper()} {path}" for path, item in served.document["paths"].items() for m in item}
    assert described == set(OPERATIONS)


def test_every_operation_describes_the_refusals_of_a_head(served: Served):
    heads = [value for value in vars(ambiguous_heads).values() if isinstance(value, Problem)]
    refused = {str(problem.status) for problem in (*heads, HEAD_TOO_LONG)}
    assert {"400", "415", "417", "431", "501"} <= refused
    for path, item in served.document["paths"].items():
        for method, operation in item.items():
            assert refused <= operation["responses"].keys(), f"{method} {path}"


ORDERS = ("POST /api/v1/models/load", "POST /api/v1/models/unload", "POST /api/v1/models/profile")
"""Operations that a node carries out and answers after minutes; the nodes here only answer requests."""


@pytest.mark.parametrize("kind", ["positive", "negative"])
@pytest.mark.parametrize("operation", thin_cases(OPERATIONS, 5))
def test_every_answer_is_one_that_is_described(served: Served, operation: str, kind: str):
    from schemathesis.generation import GenerationMode

    method, path = operation.split(" ", 1)
    found, mode = find_operation(served, path, method.upper()), GenerationMode(kind)
    if mode is GenerationMode.NEGATIVE and not found.definition.raw.keys() & {"parameters", "requestBody"}:
        return  # an empty request cannot be wrong
    session = requests.Session()
    session.trust_env = False
    headers = {"authorization": f"Bearer {served.keys['admin']}"}

    @seed(SEED)
    @settings(max_examples=EXAMPLES, deadline=None, phases=[Phase.generate], suppress_health_check=EVERY_CHECK)
    @given(st.data())
    def ask(data: st.DataObject) -> None:
        case: Any = data.draw(found.as_strategy(generation_mode=mode))
        named = isinstance(case.body, dict) and isinstance(case.body.get("model"), str)
        if named and operation not in ORDERS and data.draw(st.booleans()):
            case.body["model"] = "tiny"  # which exists
        if case.query and str(case.query.get("follow")).lower() in TRUE:
            del case.query["follow"]  # such an answer has no end
        answer = case.call(base_url=served.url, session=session, headers=headers, timeout=20)
        assert answer.status_code < 500 or answer.status_code in OURS, answer.text
        validate(case, answer)

    with session:
        ask()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat", "/api/v1/keys", "/v1/models/x"])
@pytest.mark.parametrize("wrong", ["host", "key", "origin", "method", "length"])
def test_openapi_describes_refusals_before_the_body(served: Served, path: str, wrong: str):
    get = path == "/v1/models/x"
    method = ("GET" if get else "POST") if wrong != "method" else "PATCH"
    headers = {"authorization": f"Bearer {served.keys['admin']}", "content-type": "application/json"} | {
        "host": {"host": "evil.example"},
        "key": {"authorization": "Bearer x"},
        "origin": {"origin": "null"},
        "method": {},
        "length": {"content-length": "99999999"},
    }[wrong]
    if get and wrong in ("origin", "length"):
        return  # reads have no check of the origin, and no body
    with requests.Session() as session:
        session.trust_env = False
        prepared = requests.Request(method, served.url + path, headers, data=b"{}").prepare()
        prepared.headers["content-length"] = headers.get("content-length", "2")
        answer = session.send(prepared, timeout=20)
    assert answer.status_code == {"host": 421, "key": 401, "origin": 403, "method": 405, "length": 413}[wrong]
    assert answer.elapsed.total_seconds() < 5, "nothing is waited for"
    described = "/v1/models/{model}" if get else path
    operation = find_operation(served, described, "GET" if get else "POST")
    case = operation.Case(path_parameters={"model": "x"} if get else {}, method=operation.method)
    validate(case, answer)
    if wrong == "method":
        assert answer.headers["allow"] == {"/v1/models/x": "GET, HEAD", "/api/v1/keys": "GET, POST"}.get(path, "POST")


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_openapi_describes_the_refusal_of_an_unload(served: Served, path: str):
    with requests.Session() as session:
        session.trust_env = False
        headers = {"authorization": f"Bearer {served.keys['admin']}"}
        answer = session.post(served.url + path, json={"model": "tiny", "keep_alive": 0}, headers=headers, timeout=20)
    assert answer.status_code == 501
    validate(find_operation(served, path, "POST").Case(method="POST"), answer)


def test_the_guard_in_the_way_is_the_one_of_the_product(served: Served):
    assert isinstance(served.cluster.app, OriginCheck)
