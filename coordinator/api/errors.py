"""Errors of the control plane, in the same JSON format as the errors of the inference routes."""

from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from coordinator.state.store_errors import StoreError
from router.errors import Problem, build_invalid, build_not_found, build_wrong_method
from router.http.exchange import choose_request_id


class ProblemError(Exception):
    """Raised in a route to answer the request with `problem`."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def build_response(problem: Problem, request: Request) -> Response:
    """Return the HTTP response for a problem, in the API's JSON format.

    Body and headers have the `x-request-id` of `request` if that is valid, else a new id.
    """
    request_id = choose_request_id(request.scope["headers"])
    headers = {name.decode(): value.decode() for name, value in problem.build_headers()} | {"x-request-id": request_id}
    body = problem.encode_body(request_id)
    return Response(body, problem.status, headers, "application/json")


def install_error_handlers(app: FastAPI) -> None:
    """Install handlers in `app` that answer expected errors in the API's format. Other errors have no handler.

    A `ProblemError` and an `HTTPException` keep their status. A `StoreError` becomes 503. A `RequestValidationError`
    becomes 400; the message describes its first fault.
    """
    app.add_exception_handler(ProblemError, _on_problem)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(StoreError, _on_store)


async def _on_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, ProblemError)  # noqa: S101  registered for this type
    return build_response(error.problem, request)


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)  # noqa: S101  registered for this type
    first = error.errors()[0]
    where = ".".join(str(step) for step in first["loc"][1:])
    return build_response(build_invalid(f"{where or 'body'}: {first['msg']}", where or None), request)


async def _on_store(request: Request, error: Exception) -> Response:
    """Answer with a 503 problem if a change could not be written to the disk."""
    return build_response(Problem(503, "state_not_written", str(error)), request)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101  registered for this type
    if error.status_code == HTTPStatus.NOT_FOUND:
        return build_response(
            build_not_found(request.url.path, f"{request.url.scheme}://{request.url.netloc}"), request
        )
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        return build_response(build_wrong_method(request.method, ", ".join(_find_allowed_methods(request))), request)
    if error.status_code == HTTPStatus.BAD_REQUEST:
        return build_response(build_invalid(str(error.detail)), request)
    return build_response(Problem(error.status_code, "http_error", str(error.detail)), request)


def _find_allowed_methods(request: Request) -> list[str]:
    """Return the methods of all routes at a path. The framework returns the methods of the first route only."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    return sorted(
        method
        for route in routes
        if route.matches(request.scope)[0] is not Match.NONE
        for method in route.methods or ()
    )
