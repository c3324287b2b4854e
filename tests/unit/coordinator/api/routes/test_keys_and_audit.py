"""Keys with limits, their usage, and the audit log, through the API of the coordinator."""

import asyncio
import sqlite3
import threading
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from coordinator.api.auth import wrap_audited
from coordinator.api.routes.requests import WallClock, summarize_request
from coordinator.observe.load_history import LoadReading, NodeLoad
from coordinator.state.rows import MemberRow
from coordinator.state.store_errors import StoreError
from router.admission.api_keys import create_anonymous_key
from router.admission.rate_limits import KeyLimits
from router.admission.usage import UsageTotals
from router.dispatch.decision_log import RequestRecord, parse_line
from router.dispatch.request import RequestSpec
from router.placement.candidate import ResourceDemand
from router.placement.cluster_view import ClusterView, NodeView
from router.worker_thread import run_in_worker
from tests.support.cluster.application import Application, application
from tests.support.cluster.loopback_cluster import a_model
from wire.frames import GenerationParams, Message, Timings
from wire.identity import NodeId
from wire.report import Hardware

A, B = NodeId("a"), NodeId("b")


@pytest.fixture
async def built(tmp_path: Path) -> AsyncIterator[Application]:
    async with application(tmp_path) as made:
        yield made


@pytest.fixture
async def admin(built: Application) -> AsyncIterator[httpx.AsyncClient]:
    key = built.admin.create_key("boss", ["admin"], None)["key"]
    async with client(built, key) as made:
        yield made


def client(built: Application, key: str) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=built.app, raise_app_exceptions=False)
    return httpx.AsyncClient(
        transport=transport, base_url="http://127.0.0.1", trust_env=False, headers={"authorization": f"Bearer {key}"}
    )


async def make(admin: httpx.AsyncClient, name: str = "app", **limits: object) -> dict[str, Any]:
    answer = await admin.post("/api/v1/keys", json={"name": name, "limits": limits})
    assert answer.status_code == 200, answer.text
    return answer.json()


def chat(model: str = "tiny") -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}]}


async def test_a_keys_limits_are_listed_changed_and_kept(built: Application, admin: httpx.AsyncClient):
    made = await make(admin, models=["qwen*"], requests_per_minute=10, priority="high")
    (listed,) = [key for key in (await admin.get("/api/v1/keys")).json()["keys"] if key["id"] == made["id"]]
    assert listed["limits"] == {"models": ["qwen*"], "requests_per_minute": 10, "priority": "high"}
    answer = await admin.put(f"/api/v1/keys/{made['id']}/limits", json={"limits": {"concurrency": 3}})
    assert answer.status_code == 200
    row = built.store.keys[made["id"]].limits
    assert row is not None
    assert (row.concurrency, row.models) == (3, ())
    await admin.put(f"/api/v1/keys/{made['id']}/limits", json={"limits": {}})
    assert built.store.keys[made["id"]].limits is None
    assert (await admin.put("/api/v1/keys/nobody/limits", json={"limits": {}})).status_code == 404


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        ({"requests_per_minute": 0}, "requests_per_minute"),
        ({"rate": 1}, "rate"),
        ({"models": ["a"] * 65}, "models"),
        ({"priority": "now"}, "priority"),
        ({"tokens_per_minute": "many"}, "tokens_per_minute"),
    ],
)
async def test_wrong_limits_are_refused_by_name(admin: httpx.AsyncClient, limits: dict[str, Any], named: str):
    answer = await admin.post("/api/v1/keys", json={"name": "app", "limits": limits})
    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]


async def test_a_model_that_the_key_may_not_use_is_a_403(built: Application, admin: httpx.AsyncClient):
    made = await make(admin, models=["qwen*"])
    async with client(built, made["key"]) as one:
        answer = await one.post("/v1/chat/completions", json=chat("llama"))
    assert answer.status_code == 403
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == ("not_allowed", "permission_error")
    assert "qwen*" in error["message"]


async def test_over_its_rate_a_key_gets_a_429_with_the_time(built: Application, admin: httpx.AsyncClient):
    made = await make(admin, requests_per_minute=1, waiting=0)
    async with client(built, made["key"]) as one:
        first = await one.post("/v1/chat/completions", json=chat())
        second = await one.post("/v1/chat/completions", json=chat())
    assert first.json()["error"]["code"] == "over_share", "no node serves the model, and the request may not wait"
    assert second.status_code == 429
    assert second.json()["error"]["code"] == "rate_limited"
    assert int(second.headers["retry-after"]) in (59, 60)


async def test_usage_is_summed_by_key_and_model(built: Application, admin: httpx.AsyncClient):
    made = await make(admin)
    used = built.dispatcher.usage.get_totals(made["id"], "tiny")
    used.requests, used.prompt_tokens, used.completion_tokens = 2, 100, 30
    rows = (await admin.get("/api/v1/keys/usage")).json()["usage"]
    assert rows == [
        {
            "key": made["id"],
            "name": "app",
            "model": "tiny",
            "requests": 2,
            "failed": 0,
            "prompt_tokens": 100,
            "cached_tokens": 0,
            "completion_tokens": 30,
        }
    ]
    assert (await admin.get("/api/v1/keys/usage?since=2999-01-01")).json()["usage"] == []
    for day in ("yesterday", "2026-02-30", "2026-13-01", "0000-01-01", "\u0662\u0660\u0662\u0666-01-01"):
        wrong = await admin.get("/api/v1/keys/usage", params={"since": day})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "since"), day
    other = await make(admin, "other")
    async with client(built, made["key"]) as one, client(built, other["key"]) as two:
        assert (await one.get("/api/v1/usage")).json()["usage"] == rows
        assert (await two.get("/api/v1/usage")).json()["usage"] == []
        assert (await one.get("/api/v1/keys/usage")).status_code == 403


async def test_usage_is_listed_by_day_too(built: Application, admin: httpx.AsyncClient):
    made = await make(admin)
    for day, tokens in (("2026-01-31", 3), ("2026-02-01", 4), ("2026-02-01", 5)):
        built.store.usage.add(made["id"], "tiny", day, UsageTotals(1, completion_tokens=tokens))
    path = "/api/v1/keys/usage?since=2026-01-01"
    assert [row["completion_tokens"] for row in (await admin.get(path)).json()["usage"]] == [12]
    daily = (await admin.get(f"{path}&daily=true")).json()["usage"]
    assert [(row["day"], row["requests"], row["completion_tokens"]) for row in daily] == [
        ("2026-01-31", 1, 3),
        ("2026-02-01", 2, 9),
    ]
    async with client(built, made["key"]) as one:
        assert (await one.get("/api/v1/usage?daily=true&since=2026-01-01")).json()["usage"] == daily


async def test_own_usage_begins_at_the_wanted_day(built: Application, admin: httpx.AsyncClient):
    made = await make(admin)
    for day, tokens in (("2026-01-31", 3), ("2026-02-01", 4)):
        built.store.usage.add(made["id"], "tiny", day, UsageTotals(1, completion_tokens=tokens))
    async with client(built, made["key"]) as one:
        answer = (await one.get("/api/v1/usage?since=2026-02-01")).json()
    assert answer["since"] == "2026-02-01"
    assert [row["completion_tokens"] for row in answer["usage"]] == [4]


async def test_a_key_is_renamed_and_keeps_all_else(built: Application, admin: httpx.AsyncClient):
    made = await make(admin, concurrency=3)
    path = f"/api/v1/keys/{made['id']}/name"
    assert (await admin.put(path, json={"name": "laptop"})).status_code == 200
    taken = await admin.put(path, json={"name": "boss"})
    assert (taken.status_code, taken.json()["error"]["code"]) == (409, "name_taken")
    assert (await admin.put(path, json={"name": "laptop"})).status_code == 200, "its own name is no other key's"
    for name in ("local", "page", "", "two\nlines"):
        assert (await admin.put(path, json={"name": name})).status_code == 400, name
    assert (await admin.put("/api/v1/keys/nothing/name", json={"name": "x"})).status_code == 404
    async with client(built, made["key"]) as one:
        own = (await one.get("/api/v1/key")).json()
    assert (own["name"], own["scopes"], own["limits"]) == ("laptop", ["infer"], {"concurrency": 3})
    assert "digest" not in own


async def test_a_key_shows_its_own_scopes_and_expiry(built: Application, admin: httpx.AsyncClient):
    body = {"name": "app", "scopes": ["metrics", "infer"], "ttl_seconds": 600.0}
    made = (await admin.post("/api/v1/keys", json=body)).json()
    async with client(built, made["key"]) as one:
        own = (await one.get("/api/v1/key")).json()
    stored = built.store.keys[made["id"]]
    assert own == {
        "schema": 1,
        "id": made["id"],
        "name": "app",
        "scopes": ["infer", "metrics"],
        "expires": stored.created + 600.0,
        "limits": {},
    }


async def test_a_rotated_keys_old_secret_is_refused_at_once(built: Application, admin: httpx.AsyncClient):
    made = await make(admin, concurrency=3)
    async with client(built, made["key"]) as old:
        assert (await old.get("/api/v1/key")).status_code == 200
        rotated = (await admin.post(f"/api/v1/keys/{made['id']}/rotate")).json()
        assert (await old.get("/api/v1/key")).status_code == 401
    assert rotated["id"] == made["id"]
    assert rotated["key"].startswith(f"mp_{made['id']}_")
    async with client(built, rotated["key"]) as new:
        assert (await new.get("/api/v1/key")).json()["limits"] == {"concurrency": 3}
    assert (await admin.post("/api/v1/keys/nothing/rotate")).status_code == 404
    assert rotated["key"] not in (await admin.get("/api/v1/audit")).text


async def test_when_a_key_expires_is_changed(built: Application, admin: httpx.AsyncClient):
    made = await make(admin)
    path = f"/api/v1/keys/{made['id']}/expiry"
    assert (await admin.put(path, json={"ttl_seconds": 60})).status_code == 200
    assert 50 < (built.store.keys[made["id"]].expires or 0) - time.time() <= 60
    assert (await admin.put(path, json={"ttl_seconds": None})).status_code == 200
    assert built.store.keys[made["id"]].expires is None
    for body in ({}, {"ttl_seconds": 0}, {"ttl_seconds": 1e12}):
        assert (await admin.put(path, json=body)).status_code == 400, body


async def test_load_route_returns_the_last_hour(built: Application, admin: httpx.AsyncClient):
    assert (await admin.get("/api/v1/history")).json()["number"] == -1
    for at in (0.0, 10.0):
        built.load.add_reading(LoadReading(at, {A: NodeLoad(generated_tokens=int(at), memory=5, cap=10)}, queued=2))
    found = (await admin.get("/api/v1/history")).json()
    assert found["pool"]["queued"] == [2]
    assert found["nodes"] == {
        "a": {
            "prompt_tokens_per_second": [0.0],
            "generated_tokens_per_second": [1.0],
            "in_flight": [0.0],
            "memory_bytes": [5.0],
            "cap_bytes": [10.0],
            "ttft_seconds": [None],
        }
    }
    for points in ("0", "361", "x"):
        assert (await admin.get(f"/api/v1/history?points={points}")).status_code == 400


async def test_a_request_that_failed_is_counted_as_such(built: Application):
    job = RequestSpec(
        ResourceDemand("tiny", 10), "k", "r", (Message("user", "hi"),), GenerationParams(), 0, stream=False
    )
    built.dispatcher.close(built.dispatcher.submit(job))
    used = built.dispatcher.usage.get_totals("k", "")
    assert (used.requests, used.failed) == (1, 1)


async def test_names_that_clients_make_up_make_no_rows(built: Application, admin: httpx.AsyncClient):
    made = await make(admin, waiting=0)
    async with client(built, made["key"]) as one:
        for number in range(20):
            assert (await one.post("/v1/chat/completions", json=chat(f"made-up-{number}"))).status_code == 429
    (row,) = (await admin.get("/api/v1/keys/usage")).json()["usage"]
    assert (row["model"], row["requests"], row["failed"]) == ("", 20, 20)


async def test_usage_is_added_up_in_the_worker_thread(built: Application, admin: httpx.AsyncClient):
    """A year of 200 keys takes seconds, in which the loop must serve streams and nodes."""
    built.store.usage.add("k", "tiny", "2026-01-31", UsageTotals(1, 0, 30, 4, 5))
    release = threading.Event()
    busy = asyncio.create_task(run_in_worker(release.wait))
    asking = asyncio.create_task(admin.get("/api/v1/keys/usage", params={"since": "2026-01-31", "daily": "true"}))
    try:
        done, _ = await asyncio.wait({asking}, timeout=0.1)
        assert not done
    finally:
        release.set()
    (row,) = (await asking).json()["usage"]
    assert (row["day"], row["key"], row["model"], row["prompt_tokens"]) == ("2026-01-31", "k", "tiny", 30)
    await busy


async def test_audit_log_has_every_administrative_action_with_its_actor(built: Application, admin: httpx.AsyncClient):
    built.store.members.put(MemberRow(NodeId("n1"), "studio", "m", Hardware(), "", 1.0))
    boss = next(iter(built.store.keys))
    made = await make(admin)
    await admin.put(f"/api/v1/keys/{made['id']}/limits", json={"limits": {}})
    await admin.delete(f"/api/v1/keys/{made['id']}")
    await admin.delete("/api/v1/keys/nobody")
    named = (await admin.post("/api/v1/tokens", json={"name": "for the lab"})).json()
    unnamed = (await admin.post("/api/v1/tokens", json={})).json()
    await admin.get("/api/v1/keys")
    acts = (await admin.get("/api/v1/audit")).json()["acts"]
    assert [(act["actor"], act["action"], act["subject"]) for act in acts] == [
        (boss, "create_key", f"app {made['id']}"),
        (boss, "limit_key", made["id"]),
        (boss, "revoke_key", made["id"]),
        (boss, "create_token", f"for the lab {named['id']}"),
        (boss, "create_token", unnamed["id"]),
    ]
    secrets = [made["key"], named["token"], unnamed["token"]]
    assert not any(secret in str(acts) for secret in secrets), "no secret is written down"
    assert (await admin.get("/api/v1/audit?last=1")).json()["acts"] == acts[-1:]
    reader = built.admin.create_key("reader", ["infer", "metrics"], None)["key"]
    async with client(built, reader) as one:
        assert (await one.get("/api/v1/audit")).status_code == 403


async def test_audit_log_cuts_long_subjects(built: Application, admin: httpx.AsyncClient):
    async def act(name: str) -> dict[str, str]:
        return {"id": "made"}

    await wrap_audited(built.store, act)(name="a" * 299)
    await wrap_audited(built.store, act)(name="a" * 301)
    acts = (await admin.get("/api/v1/audit")).json()["acts"]
    assert [act["subject"] for act in acts] == ["a" * 299 + " ", "a" * 300]


# requests, explained


async def test_a_request_is_explained_by_its_id(built: Application, admin: httpx.AsyncClient):
    made = await make(admin, waiting=0)
    async with client(built, made["key"]) as one:
        answer = await one.post("/v1/chat/completions", json=chat(), headers={"x-request-id": "mine-1"})
        assert answer.status_code == 429
        assert (await one.get("/api/v1/requests/mine-1")).status_code == 403, "it shows other keys' requests"
    told = (await admin.get("/api/v1/requests/mine-1")).json()
    (story,) = told["requests"]
    assert (story["outcome"], story["key"], story["model"]) == ("over_share", made["id"], "tiny")
    (decision,) = told["decisions"]
    assert decision["chosen"] is None
    assert "no node has reported a model" in decision["refused"]
    listed = (await admin.get("/api/v1/requests?last=1")).json()["requests"]
    assert listed == told["requests"]
    missing = await admin.get("/api/v1/requests/nobody")
    assert missing.status_code == 404
    assert "the newest 1000 are" in missing.json()["error"]["message"]
    lines = (await admin.get("/api/v1/decisions")).content.splitlines()
    assert parse_line(lines[-1]).request_id == "mine-1"


@pytest.mark.parametrize(
    ("seconds", "decode", "tokens", "rate"),
    [
        (2.5, 1.0, 21, 10.0),
        (0.51, 0.4, 21, 50.0),
        (0.51, 0.001, 21, None),
        (2.5, 1.0, 1, None),
        (2.5, 1.0, 0, None),
    ],
)
def test_a_requests_row_has_its_time_mac_and_speed(seconds: float, decode: float, tokens: int, rate: float | None):
    steps = (
        (0.0, "sent", "mini"),
        (0.2, "refused: no_headroom", "mini"),
        (0.3, "sent", "studio"),
        (0.5, "first token", "studio"),
    )
    story = RequestRecord("r", "k", "tiny", True, 100.0, seconds, "ok", "", steps, 5, 0, tokens, Timings(decode=decode))
    row = summarize_request(story, WallClock(lambda: 110.0))
    assert (row["node"], row["ttft_seconds"], row["tokens_per_second"]) == ("studio", 0.5, rate)
    assert abs(row["at"] - (time.time() - 10)) < 1


async def test_a_request_under_way_is_explained_by_its_phase_and_steps(built: Application, admin: httpx.AsyncClient):
    job = RequestSpec(
        ResourceDemand("tiny", 100), "k", "mine-2", (Message("user", "hi"),), GenerationParams(), 0, stream=True
    )
    ticket = built.dispatcher.submit(job)
    for phase, swap in (("queued", ""), ("waiting for a model swap on studio (one -> two)",) * 2):
        ticket.swap = swap
        (now,) = (await admin.get("/api/v1/requests/mine-2")).json()["under_way"]
        assert (now["phase"], now["model"], [step["what"] for step in now["steps"]]) == (phase, "tiny", ["queued"])
    built.dispatcher.close(ticket)
    assert (await admin.get("/api/v1/requests/mine-2")).json()["under_way"] == []


async def test_models_route_lists_only_models_the_key_may_use(built: Application, admin: httpx.AsyncClient):
    models = tuple(a_model(name, context=4096) for name in ("qwen3", "llama"))
    built.dispatcher.set_view(
        ClusterView(
            (
                NodeView(A, "a", "ready", models={model.name: model for model in models}),
                NodeView(B, "b", "ready", models={"other": a_model("other")}, labels=frozenset({"lab"})),
            )
        )
    )
    some, lab = await make(admin, models=["qwen*"]), await make(admin, "lab", labels=["lab"])
    for key, expected in ((some, ["qwen3"]), (lab, ["other"])):
        async with client(built, key["key"]) as one:
            assert [model["id"] for model in (await one.get("/v1/models")).json()["data"]] == expected
            assert [model["name"] for model in (await one.get("/api/tags")).json()["models"]] == expected
            theirs = await one.get("/v1/models", headers={"anthropic-version": "2023-06-01"})
            assert [model["id"] for model in theirs.json()["data"]] == expected
            assert (await one.get("/v1/models/llama")).status_code == 404
    async with client(built, some["key"]) as one:
        count = await one.post("/v1/messages/count_tokens", json=chat("llama"))
        assert count.status_code == 403
        assert "may not use the model 'llama'" in count.json()["error"]["message"]


# without a key


async def test_without_a_key_nothing_is_answered_unless_it_was_allowed(built: Application):
    async with client(built, "sk-anything") as junk:
        assert (await junk.get("/v1/models")).status_code == 401
        built.admin.ring.anonymous = create_anonymous_key(0.0)
        assert (await junk.get("/v1/models")).status_code == 200
        assert (await junk.get("/v1/models", headers={"authorization": ""})).status_code == 200
        assert (await junk.get("/api/v1/nodes")).status_code == 403
        assert (await junk.post("/api/v1/keys", json={"name": "mine"})).status_code == 403
        wrong = await junk.get("/v1/models", headers={"authorization": "Bearer mp_abcdefgh_wrong"})
        assert wrong.status_code == 401, "a wrong key in our format is rejected"


async def test_a_second_key_of_one_name_is_refused_until_the_first_is_revoked(admin: httpx.AsyncClient):
    first = await make(admin)
    for name in ("app", "APP", first["id"]):
        answer = await admin.post("/api/v1/keys", json={"name": name})
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "name_taken")
        assert first["id"] in answer.json()["error"]["message"]
    assert (await admin.delete(f"/api/v1/keys/{first['id']}")).status_code == 200
    await make(admin)


# Persistence


async def test_stored_keys_open_with_their_scopes_expiry_and_limits_after_a_restart(tmp_path: Path):
    async with application(tmp_path) as first:
        limits = KeyLimits(models=("qwen*",), concurrency=2)
        bounded = first.admin.create_key("app", ["infer"], 3600.0, limits)
        reader = first.admin.create_key("reader", ["metrics", "infer"], None)
        revoked = first.admin.create_key("gone", ["admin"], None)
        first.admin.revoke_key(revoked["id"])
        rotated = first.admin.rotate_key(reader["id"])
        assert first.admin.ring.check(reader["key"]) is None
    async with application(tmp_path) as second:
        ring = second.admin.ring
        assert ring.check(bounded["key"]) is None, "nothing opens before the keys are loaded"
        second.admin.load_keys()
        key = ring.check(bounded["key"])
        assert key is not None
        assert (key.name, key.scopes, key.limits) == ("app", {"infer"}, limits)
        assert abs((key.expires or 0) - time.time() - 3600) < 60
        assert ring.check(rotated or "") == ring.find_key(reader["id"])
        assert [ring.check(text["key"]) for text in (reader, revoked)] == [None, None]
        assert {row["name"]: row["scopes"] for row in second.admin.list_keys()["keys"]} == {
            "app": ["infer"],
            "reader": ["infer", "metrics"],
        }
        assert ring.get_names() == {bounded["id"]: "app", reader["id"]: "reader"}


async def test_usage_is_kept_for_400_days_and_counted_once(built: Application):
    today = datetime.now(UTC).date()
    kept, old, *recent = (today - timedelta(days=days) for days in (400, 401, 5, 4, 3, 2, 1))
    for day in (kept, old, *recent):
        built.store.usage.add("k", "tiny", day.isoformat(), UsageTotals(1))
    used = built.dispatcher.usage.get_totals("k", "tiny")
    used.requests, used.failed, used.prompt_tokens, used.cached_tokens, used.completion_tokens = 2, 1, 30, 4, 5
    for _ in range(2):
        built.admin.usage.record(built.dispatcher.usage)
    assert [(row.key, row.model, row.day, row.used) for row in built.store.usage.list_rows()] == [
        *(("k", "tiny", day.isoformat(), UsageTotals(1)) for day in (kept, *recent)),
        ("k", "tiny", today.isoformat(), UsageTotals(2, 1, 30, 4, 5)),
    ]


async def test_key_changes_apply_in_memory_and_on_disk_immediately(built: Application):
    admin, ring = built.admin, built.admin.ring
    made = admin.create_key("app", ["infer"], None)
    assert admin.set_key_limits(made["id"], KeyLimits(concurrency=3))
    assert admin.rename_key(made["id"], "laptop")
    assert admin.set_key_expiry(made["id"], 60.0)
    key, row = ring.check(made["key"]), built.store.keys[made["id"]]
    assert key is not None
    assert (key.name, key.limits, key.expires) == (row.name, row.limits, row.expires)
    assert (row.name, row.limits) == ("laptop", KeyLimits(concurrency=3))
    assert ring.get_limits(made["id"]) == KeyLimits(concurrency=3)
    assert admin.revoke_key(made["id"])
    assert ring.check(made["key"]) is None
    assert made["id"] not in built.store.keys
    assert not admin.revoke_key(made["id"])


async def test_routes_that_store_describe_and_answer_a_failed_write(tmp_path: Path):
    answers = list[tuple[str, int, str]]()
    with pytest.raises(StoreError):  # at the end, when the application closes its store
        await try_routes_without_disk(tmp_path, answers)
    assert [answer for answer in answers if answer[1:] != (503, "state_not_written")] == []
    assert len(answers) == 5


async def try_routes_without_disk(folder: Path, answers: list[tuple[str, int, str]]) -> None:
    """Call routes that store, after a failed write. Append path, status and error code of each answer."""
    async with application(folder) as built:
        key = built.admin.create_key("boss", ["admin"], None)["key"]
        await built.store.flush()
        other = sqlite3.connect(folder / "cluster.db")
        other.execute("DROP TABLE audit")
        other.close()
        built.store.audit.add(1.0, "person", "create keys", "laptop")
        with pytest.raises(StoreError):
            await built.store.flush()
        async with client(built, key) as http:
            paths = (await http.get("/api/v1/openapi.json")).json()["paths"]
            for method, path, body in (
                ("GET", "/api/v1/usage", None),
                ("GET", "/api/v1/keys/usage", None),
                ("POST", "/api/v1/tokens", {}),
                ("POST", "/api/v1/keys", {"name": "app"}),
                ("PUT", "/api/v1/models/wishes/{model}", {"replicas": 1}),
            ):
                built.dispatcher.usage.get_totals("a", "tiny").count(1, 0, 1, failed=False)
                answer = await http.request(method, path.replace("{model}", "tiny"), json=body)
                answers.append((path, answer.status_code, answer.json()["error"]["code"]))
                assert "503" in paths[path][method.lower()]["responses"]
            for path in ("/api/v1/nodes/{node}/cordon", "/api/v1/nodes/{node}/drain", "/api/v1/models/load"):
                assert "503" in paths[path]["post"]["responses"]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", "/api/v1/models/wishes/wanted", {"replicas": 2}),
        ("DELETE", "/api/v1/models/wishes/wanted", None),
        ("POST", "/api/v1/keys", {"name": "another"}),
        ("PUT", "/api/v1/keys/KEY/limits", {"limits": {}}),
        ("PUT", "/api/v1/keys/KEY/name", {"name": "renamed"}),
        ("PUT", "/api/v1/keys/KEY/expiry", {"ttl_seconds": 60}),
        ("POST", "/api/v1/keys/KEY/rotate", None),
        ("DELETE", "/api/v1/keys/KEY", None),
        ("POST", "/api/v1/tokens", {}),
        ("DELETE", "/api/v1/tokens/TOKEN", None),
    ],
)
async def test_a_change_is_not_confirmed_before_it_is_on_the_disk(
    tmp_path: Path, method: str, path: str, body: dict[str, Any] | None
):
    answers = list[tuple[int, str]]()
    with pytest.raises(StoreError):  # at the end, when the application closes its store
        await change_without_disk(tmp_path, method, path, body, answers)
    assert answers == [(503, "state_not_written")]


async def change_without_disk(
    folder: Path, method: str, path: str, body: dict[str, Any] | None, answers: list[tuple[int, str]]
) -> None:
    """Call one route whose write is the first that fails. Append the status and the error code of its answer."""
    async with application(folder) as built:
        key = built.admin.create_key("boss", ["admin"], None)["key"]
        program = built.admin.create_key("program", ["infer"], None)["id"]
        async with client(built, key) as http:
            await http.put("/api/v1/models/wishes/wanted", json={"replicas": 1})
            await http.post("/api/v1/tokens", json={})
            (token,) = (row["id"] for row in (await http.get("/api/v1/tokens")).json()["tokens"])
            await built.store.flush()
            other = sqlite3.connect(folder / "cluster.db")
            tables = [name for (name,) in other.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            for name in {*tables} - {"meta", "audit", "sqlite_sequence"}:
                other.execute(f"DROP TABLE {name}")
            other.close()
            answer = await http.request(method, path.replace("KEY", program).replace("TOKEN", token), json=body)
            answers.append((answer.status_code, answer.json().get("error", {}).get("code", "")))
