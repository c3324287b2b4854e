"""Routes of the control plane: statuses and limits by method, path and scope."""

import pytest

from coordinator.api.route import JSON, MAX_BODY_BYTES, MAX_PUBLIC_BODY_BYTES, TEXT, Content, Route
from router.dialects.openapi import ALWAYS, describe_error


async def handle_call() -> None:
    """Do something.

    More about it.
    """


def a_route(
    method: str = "GET",
    path: str = "/api/v1/things",
    scope: str = "metrics",
    refusals: tuple[int, ...] = (),
    content: Content = JSON,
) -> Route:
    return Route(method, path, scope, handle_call, refusals, content)


@pytest.mark.parametrize(
    ("route", "more"),
    [
        (a_route(), ()),
        (a_route(path="/api/v1/things/{thing}"), (404,)),
        (a_route(scope="admin"), ()),
        (a_route("POST"), (408, 413)),
        (a_route("POST", scope="admin"), (408, 413, 503)),
        (a_route("DELETE", "/api/v1/things/{thing}", "admin", (409,)), (404, 408, 409, 413, 503)),
        (a_route(refusals=(409, 404)), (404, 409)),
    ],
    ids=["plain", "one thing", "of an admin", "call", "change", "change of one thing", "own refusals"],
)
def test_a_route_describes_the_statuses_that_it_may_answer(route: Route, more: tuple[int, ...]):
    described = route.describe_responses()
    statuses = sorted({*ALWAYS, *more})
    assert list(described) == ["200", *map(str, statuses)]
    assert all(described[str(status)] == describe_error("/api/v1/", status) for status in statuses)


def test_a_route_describes_its_content():
    assert a_route(content=TEXT).describe_responses()["200"] == {
        "description": "the answer",
        "content": {"text/plain": {"schema": {"type": "string"}}},
    }
    assert a_route("POST").describe_responses()["200"]["description"] == "done"


@pytest.mark.parametrize(
    ("scope", "most"), [("", MAX_PUBLIC_BODY_BYTES), ("metrics", MAX_BODY_BYTES), ("admin", MAX_BODY_BYTES)]
)
def test_a_public_route_has_shorter_bodies(scope: str, most: int):
    assert a_route(scope=scope).max_body_bytes == most
