"""API keys of control routes: the requests that may call a route, and the names under which a call is recorded."""

from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi import Request

from coordinator.api.auth import ACTOR, ADDRESS, KEY, end_with_key, require_scope, wrap_audited
from coordinator.api.body import Body
from coordinator.api.errors import ProblemError
from coordinator.state.access_admin import LOCAL_KEY_NAME, PAGE_KEY_NAME
from coordinator.state.database import Database
from router.admission.api_keys import KeyRing, new_key
from router.errors import NO_KEY, WRONG_KEY, Problem, build_missing_scope

PEPPER = b"0123456789abcdef"


def a_ring(name: str, *scopes: str) -> tuple[KeyRing, str, str]:
    """Return a ring with one key, the id of the key, and its text."""
    ring = KeyRing(PEPPER)
    key, text = new_key(PEPPER, name, scopes, created=1.0)
    ring.put(key)
    return ring, key.id, text


def a_request(text: str | None, address: str | None = "10.0.0.7") -> Request:
    """Return a request with a key, from a client at `address`."""
    headers = [] if text is None else [(b"authorization", b"Bearer " + text.encode())]
    return Request({"type": "http", "headers": headers, "client": None if address is None else (address, 50_000)})


@pytest.mark.parametrize("scope", ["admin", "metrics"])
@pytest.mark.parametrize("has_address", [True, False])
async def test_a_request_with_the_scope_is_recorded_under_the_id_of_its_key(scope: str, has_address: bool):
    ring, key_id, text = a_ring("laptop", scope)
    address = "10.0.0.7" if has_address else None
    await require_scope(ring, scope)(a_request(text, address))
    assert (ACTOR.get(), KEY.get(), ADDRESS.get()) == (key_id, key_id, address or "")


@pytest.mark.parametrize("name", [LOCAL_KEY_NAME, PAGE_KEY_NAME])
async def test_this_machine_and_the_page_are_recorded_by_name(name: str):
    ring, key_id, text = a_ring(name, "admin")
    await require_scope(ring, "metrics")(a_request(text))
    assert (ACTOR.get(), KEY.get()) == (name, key_id)


async def test_an_audited_call_is_recorded_with_its_actor_address_and_subject(tmp_path: Path):
    store = Database(tmp_path)

    class PullBody(Body):
        repo: str
        node: str = ""

    async def pull(body: PullBody) -> dict[str, Any]:
        if body.repo == "wrong":
            raise ProblemError(WRONG_KEY)
        return {"schema": 1, "pull": {"id": "pull-1"}}

    async def remove_node(node: str) -> dict[str, Any]:
        return {"schema": 1, "id": "node-1", "name": node}

    ring, _, text = a_ring(PAGE_KEY_NAME, "admin")
    await require_scope(ring, "admin")(a_request(text))
    audited = wrap_audited(store, pull)
    assert await audited(body=PullBody(repo="pub/model", node="studio")) == {"schema": 1, "pull": {"id": "pull-1"}}
    with pytest.raises(ProblemError):
        await audited(body=PullBody(repo="wrong"))
    await wrap_audited(store, remove_node)(node="studio")
    await audited(body=PullBody(repo="x" * 400))
    rows = [(row.actor, row.address, row.action, row.subject) for row in store.audit]
    store.close()
    assert rows == [
        (PAGE_KEY_NAME, "10.0.0.7", "pull", "pub/model studio pull-1"),
        (PAGE_KEY_NAME, "10.0.0.7", "remove_node", "studio node-1"),
        (PAGE_KEY_NAME, "10.0.0.7", "pull", "x" * 300),
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [(None, NO_KEY), ("mp_unknown_secret", WRONG_KEY), ("its own", build_missing_scope("admin"))],
    ids=["no key", "wrong key", "other scope"],
)
async def test_any_other_request_is_refused_and_not_recorded(text: str | None, problem: Problem):
    ring, _, own = a_ring("laptop", "infer", "metrics")
    with pytest.raises(ProblemError) as error:
        await require_scope(ring, "admin")(a_request(own if text == "its own" else text))
    assert error.value.problem == problem
    assert (ACTOR.get(), KEY.get(), ADDRESS.get()) == ("", "", "")


ENDS: dict[str, Callable[[KeyRing, str], object]] = {
    "revoked": lambda ring, key: ring.drop(key),
    "rotated": lambda ring, key: ring.put(replace(ring.list()[0], digest=b"another")),
    "expired": lambda ring, key: ring.put(replace(ring.list()[0], expires=2.0)),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
async def test_a_stream_ends_with_its_key_and_closes_its_source(end: Callable[[KeyRing, str], object]):
    ring, key_id, text = a_ring("laptop", "admin")
    closed: list[bool] = []

    async def source() -> AsyncGenerator[bytes]:
        try:
            for piece in (b"one", b"two", b"three"):
                yield piece
        finally:
            closed.append(True)

    await require_scope(ring, "admin")(a_request(text))
    stream = end_with_key(source())
    assert await anext(stream) == b"one"
    end(ring, key_id)
    assert [piece async for piece in stream] == []
    assert closed == [True]
