"""Errors of the control plane: status, code, text and headers of each kind of error."""

from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI
from starlette.exceptions import HTTPException

from coordinator.api.errors import ProblemError, install_error_handlers
from coordinator.state.store_errors import StoreError
from router.errors import Problem

ERRORS: dict[str, Exception] = {
    "problem": ProblemError(Problem(409, "busy", "it is busy", "node", retry_after=7)),
    "store": StoreError("the disk is full"),
    "teapot": HTTPException(418, "a teapot"),
    "bad": HTTPException(400, "no JSON"),
}


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI()
    install_error_handlers(app)

    async def fail(kind: str, size: int = 1) -> None:
        raise ERRORS[kind]

    app.add_api_route("/fail/{kind}", fail, methods=["GET"])
    app.add_api_route("/fail/{kind}", fail, methods=["PUT", "DELETE"])
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8080") as made:
        yield made


@pytest.mark.parametrize(
    ("kind", "status", "code", "param", "message"),
    [
        ("problem", 409, "busy", "node", "it is busy"),
        ("store", 503, "state_not_written", None, "the disk is full"),
        ("teapot", 418, "http_error", None, "a teapot"),
        ("bad", 400, "invalid_request", None, "no JSON"),
        ("store?size=x", 400, "invalid_request", "size", "size: Input should be a valid integer"),
    ],
)
async def test_each_kind_of_error_has_its_status_code_parameter_and_text(
    client: httpx.AsyncClient, kind: str, status: int, code: str, param: str | None, message: str
):
    answer = await client.get(f"/fail/{kind}", headers={"x-request-id": "mine"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param)
    assert error["message"].startswith(message)
    assert error["request_id"] == answer.headers["x-request-id"] == "mine"
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers.get("retry-after") == ("7" if kind == "problem" else None)


async def test_a_wrong_method_names_the_methods_of_all_routes_of_the_path(client: httpx.AsyncClient):
    answer = await client.post("/fail/problem")
    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")
    assert answer.headers["allow"] == "DELETE, GET, PUT"
    assert "use DELETE, GET, PUT" in answer.json()["error"]["message"]


async def test_an_unknown_path_names_the_address_of_the_right_one(client: httpx.AsyncClient):
    plain, shifted = await client.get("/nothing"), await client.get("/v1/v1/models")
    assert [answer.status_code for answer in (plain, shifted)] == [404, 404]
    assert plain.json()["error"]["message"] == "unknown path /nothing"
    assert "base URL to http://127.0.0.1:8080" in shifted.json()["error"]["message"]
