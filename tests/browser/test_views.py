"""Each view of the page shows the values of the API, and each button sends the right request.

The page's own files run in a real browser. The API is a table of answers, therefore every value is known.
"""

import csv
import io
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import BrowserContext, Dialog, Locator, Page, Route, expect

from coordinator.cluster.member_state import Member
from coordinator.observe.node_rows import NodeFacts, build_node_row
from coordinator.state.rows import MemberRow
from router.placement.sanitize_report import build_node_view
from tests.browser.chromium import CHROMIUM
from tests.browser.test_page import sound
from tests.support.cluster.loopback_cluster import a_model
from wire.frames import Report
from wire.identity import NodeId
from wire.node_state import NodeState
from wire.refusals import FailureCode, RefusalCode
from wire.report import EngineCounters, EngineState, Hardware, Memory, Sharing
from wire.units import GIB, KIB, MIB

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")]
BASE = "http://pool.test"
TYPES = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml", "html": "text/html"}
AT = 1_700_000_000
CLOSED = {"state": "closed", "why": "", "until": None}
OWN: dict[str, Any] = {"id": "k0", "name": "boss", "scopes": ["admin"], "expires": None, "limits": {}}


def node(name: str = "studio", state: NodeState = NodeState.READY, **changes: Any) -> dict[str, Any]:
    """Return a node as in the API; every size differs."""
    memory = Memory(
        cap=96 * GIB,
        ceiling=96 * GIB,
        margin=10 * GIB,
        phys=40 * GIB,
        recent=48 * GIB,
        current=40 * GIB,
        reserved=8 * GIB,
        headroom=38 * GIB,
        leases=6 * GIB,
        bound_by="dynamic",
        armed=True,
    )
    engine = EngineState("mlx", "ready", running=12, waiting=13, counts=EngineCounters(checks=1234, refusals=56))
    models = (a_model("qwen"), a_model("llama", loaded=False))
    report = Report(1, memory, engine, models, sharing=Sharing("always"))
    seen = build_node_view(report, node=NodeId(name), name=name, state=state, reported_at=0.0)
    row = MemberRow(NodeId(name), name, "m", Hardware("M4 Max", 128 * GIB), "ab", 1.0)
    found = build_node_row(seen, Member(NodeId(name), state, 0.0), row, NodeFacts(True, "1.2.3", 5, 11, 0.0))
    return found | {"breaker": CLOSED} | changes


def status(**changes: Any) -> dict[str, Any]:
    return {
        "version": "1.2.3",
        "protocol": 7,
        "base_url": "http://host:8080/v1",
        "cluster_url": "macpool://host:8081",
        "cluster": {"id": "c-1", "name": "home"},
        "models": ["qwen", "llama", "tiny"],
        "in_flight": 4,
        "queued": 1234,
        "warnings": [],
        "dangers": [],
        "self_suspect": False,
    } | changes


def load(**values: float | None) -> dict[str, list[float | None]]:
    names = (
        "prompt_tokens_per_second",
        "generated_tokens_per_second",
        "in_flight",
        "memory_bytes",
        "cap_bytes",
        "ttft_seconds",
        "requests_per_second",
        "queued",
    )
    return {name: [None, values.get(name)] for name in names}


@dataclass
class Answers:
    """Answers of the API by method and path, and the requests that were sent."""

    sections: dict[str, Any] = field(default_factory=dict[str, Any])
    by_path: dict[str, Any] = field(default_factory=dict[str, Any])
    asked: list[tuple[str, str, Any]] = field(default_factory=list[tuple[str, str, Any]])

    def __call__(self, route: Route) -> None:
        request, url = route.request, urlsplit(route.request.url)
        if url.path == "/" or url.path.startswith("/ui/"):
            name = url.path.removeprefix("/ui/") if url.path != "/" else "index.html"
            body = (files("coordinator.ui") / "static" / name).read_text()
            route.fulfill(body=body, content_type=TYPES[name.rpartition(".")[2]])
            return
        asked = f"{request.method} {url.path}"
        if asked == "GET /api/v1/live":
            told = "".join(f"event: {name}\ndata: {json.dumps(value)}\n\n" for name, value in self.sections.items())
            route.fulfill(body=told, content_type="text/event-stream")
            return
        if request.method != "GET":
            self.asked.append((request.method, url.path, json.loads(request.post_data or "null")))
        answer = self.by_path.get(asked, {})
        if isinstance(answer, str):
            route.fulfill(status=409, json={"error": {"message": answer, "code": "refused"}})
        else:
            route.fulfill(json=answer)


@pytest.fixture
def api() -> Answers:
    now = status()
    load_now = {"interval_seconds": 10, "number": 1, "at": AT, "pool": load(), "nodes": {}}
    made = Answers(
        {
            "status": now,
            "nodes": [node()],
            "models": [],
            "aliases": [],
            "pulls": [],
            "wishes": [],
            "requests": [],
            "ended": [],
            "joins": [],
            "conditions": [],
            "load": load_now,
        }
    )
    made.by_path = {"GET /api/v1/key": OWN, "GET /api/v1/history": load_now}
    return made


@pytest.fixture
def page(context: BrowserContext, api: Answers) -> Iterator[Page]:
    context.add_init_script("localStorage.setItem('macpool-key', 'mp_test_key')")
    made = context.new_page()
    made.route("**/*", api)
    yield made
    made.unroute_all(behavior="ignoreErrors")


SETTLED = """async () => {
    const wait = (seconds) => new Promise((done) => setTimeout(done, seconds * 1000));
    for (let seen = -1, round = 0; round < 40; round += 1) {
        const answered = performance.getEntriesByType("resource").length;
        if (answered === seen) break;
        seen = answered;
        await wait(0.25);
    }
    await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
}"""
"""Waits until no answer of the API has arrived for a quarter of a second, and two frames were painted."""


def show(page: Page, view: str = "pool") -> None:
    """Open a view; return when it shows the answer of the API."""
    page.goto(f"{BASE}/#/{view}")
    expect(page.get_by_role("heading", level=2)).to_be_visible()
    page.evaluate(SETTLED)


def cells(row: Locator) -> list[str]:
    return row.get_by_role("cell").all_inner_texts()


def sent(api: Answers, button: Locator) -> tuple[str, str, Any]:
    """Press a button; return method, path and body of the request that it sends."""
    before = len(api.asked)
    button.click()
    expect(button.page.locator("body")).to_be_visible()
    deadline = time.monotonic() + 10
    while len(api.asked) == before and time.monotonic() < deadline:
        button.page.wait_for_timeout(20)
    return api.asked[-1]


# the live stream


def test_a_page_from_before_an_update_of_the_coordinator_offers_to_reload_itself(page: Page, api: Answers):
    show(page)
    old = page.get_by_text("but this page is version")
    expect(old).to_have_count(0)
    api.sections["status"] = status(version="1.3.0")
    expect(old).to_contain_text("The coordinator has been updated to version 1.3.0, but this page is version 1.2.3.")
    page.get_by_role("button", name="Reload").click()
    expect(page.get_by_role("heading", level=2)).to_be_visible()
    page.evaluate(SETTLED)
    expect(old).to_have_count(0)


OPEN_STREAM = """() => {
    const real = window.fetch;
    window.opened = window.aborted = 0;
    window.fetch = async (path, options) => {
        const answer = await real(path, options);
        if (!path.startsWith("/api/v1/live")) return answer;
        const sections = new Uint8Array(await answer.arrayBuffer());
        window.opened += 1;
        return new Response(new ReadableStream({ start(stream) {
            stream.enqueue(sections);
            window.send = (text) => stream.enqueue(new TextEncoder().encode(text));
            options.signal.addEventListener("abort", () => {
                window.aborted += 1;
                stream.error(options.signal.reason);
            });
        } }));
    };
}"""
"""Keeps each live stream open after its first sections, as a connection does whose other end is gone without a word."""


def test_a_live_stream_that_falls_silent_is_opened_again(page: Page):
    page.clock.install()
    page.add_init_script(f"({OPEN_STREAM})()")
    show(page)
    page.clock.fast_forward(30_000)
    page.evaluate("window.send(': still here\\n\\n')")
    page.evaluate(SETTLED)
    page.clock.fast_forward(30_000)
    page.evaluate(SETTLED)
    assert page.evaluate("window.opened") == 1, "a comment shows that the connection works"
    page.clock.fast_forward(30_000)
    page.wait_for_function("window.opened === 2")


def test_a_hidden_tab_has_no_live_stream(page: Page):
    """Browsers allow six connections to a server for all tabs: streams of hidden tabs would block the visible one."""
    page.add_init_script(f"({OPEN_STREAM})()")
    show(page)

    def turn(*, hidden: bool) -> None:
        page.evaluate(
            """(hidden) => {
            Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
            document.dispatchEvent(new Event("visibilitychange"));
        }""",
            hidden,
        )

    turn(hidden=True)
    page.wait_for_function("window.aborted === 1")
    turn(hidden=False)
    page.wait_for_function("window.opened === 2")
    expect(page.get_by_text("The coordinator does not answer")).to_have_count(0)
    assert page.evaluate("window.aborted") == 1


def test_the_reason_is_shown_while_no_live_stream_can_be_opened(page: Page):
    full = {"error": {"message": "32 pages are open, which is the limit: close one", "code": "too_many_viewers"}}
    page.route("**/api/v1/live?*", lambda route: route.fulfill(status=503, json=full))
    show(page)
    expect(page.get_by_text("32 pages are open, which is the limit: close one. Retrying.")).to_be_visible()
    page.unroute("**/api/v1/live?*")
    expect(page.get_by_role("region", name="studio")).to_be_visible()


# signing in and out


def test_a_link_of_the_command_signs_in_in_an_open_page_and_a_used_link_ends_no_session(page: Page, api: Answers):
    show(page)
    used = {"error": {"message": "this link was used", "code": "link_used_up"}}
    page.route("**/api/v1/page/visits", lambda route: route.fulfill(status=401, json=used))
    with page.expect_response("**/api/v1/page/visits"):
        page.evaluate("location.hash = '#in=used'")
    expect(page.get_by_role("button", name="Sign out")).to_be_visible()
    assert page.evaluate("localStorage.getItem('macpool-key')") == "mp_test_key"
    page.unroute("**/api/v1/page/visits")
    api.by_path["POST /api/v1/page/visits"] = {"key": "mp_new_key", "expires": AT}
    page.evaluate("location.hash = '#in=fresh'")
    page.wait_for_function("localStorage.getItem('macpool-key') === 'mp_new_key'")
    expect(page.get_by_role("button", name="Sign out")).to_be_visible()
    assert ("POST", "/api/v1/page/visits", {"code": "fresh"}) in api.asked
    assert "in=" not in page.url


def test_a_view_that_was_opened_while_the_coordinator_restarted_asks_again(page: Page, api: Answers):
    api.by_path |= {"GET /api/v1/keys": {"keys": [KEY]}, "GET /api/v1/keys/usage": {"usage": []}}
    page.route("**/api/v1/keys", lambda route: route.abort())
    show(page, "keys")
    keys = page.get_by_role("region", name="API keys")
    expect(keys.get_by_role("alert")).to_have_text("The coordinator does not answer")
    page.unroute("**/api/v1/keys")
    expect(keys.get_by_role("button", name="Rotate")).to_be_visible()
    expect(keys.get_by_role("alert")).to_have_count(0)


def test_a_key_that_ends_while_the_page_is_open_is_named_as_the_reason(page: Page):
    show(page)
    wrong = {"error": {"message": "this API key is unknown", "code": "invalid_api_key"}}
    page.route("**/api/v1/live?*", lambda route: route.fulfill(status=401, json=wrong))
    expect(page.get_by_role("heading", name="Sign in to Macpool")).to_be_visible()
    expect(page.get_by_role("alert")).to_contain_text("The key of this page has expired, was revoked")
    page.get_by_label("Or enter an API key").fill("mp_other")
    page.route("**/api/v1/key", lambda route: route.fulfill(status=401, json=wrong))
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_have_text("this API key is unknown")


def test_signing_out_does_not_wait_for_the_coordinator(page: Page):
    held = list[Route]()
    page.route("**/api/v1/page/visit", lambda route: held.append(route))
    show(page)
    with page.expect_request("**/api/v1/page/visit") as asked:
        page.get_by_role("button", name="Sign out").click()
    assert asked.value.headers["authorization"] == "Bearer mp_test_key"
    expect(page.get_by_role("heading", name="Sign in to Macpool")).to_be_visible()
    assert page.evaluate("localStorage.getItem('macpool-key')") is None


# the pool


def test_a_macs_card_has_the_values_of_its_report(page: Page, api: Answers):
    show(page)
    card = page.get_by_role("region", name="studio")
    bar = card.get_by_role("meter")
    expect(bar).to_have_attribute(
        "aria-valuetext",
        "in use 40.0 GiB, reserved 8.0 GiB, margin 10.0 GiB, leased to video 6.0 GiB, of a cap of 96.0 GiB",
    )
    expect(bar).to_have_attribute("aria-valuenow", str(40 * GIB))
    expect(bar).to_have_attribute("aria-valuemax", str(96 * GIB))
    from_left = 0.0
    for name, size in (("current", 40), ("reserved", 8), ("margin", 10), ("lease", 6)):
        piece = bar.locator(f"rect.{name}")
        assert float(piece.get_attribute("x") or 0) == pytest.approx(from_left)
        assert float(piece.get_attribute("width") or 0) == pytest.approx(size / 96 * 1000)
        from_left += size / 96 * 1000
    assert float(bar.locator("rect.peak").get_attribute("x") or 0) == pytest.approx(500)
    for text in (
        "headroom 38.0 GiB",
        "of 96.0 GiB, limited by: other apps",
        "11 in flight, 12 running, 13 waiting",
        "1,234 checks, 56 refusals",
        "M4 Max, 128.0 GiB, version 1.2.3",
        "gate armed",
        "not allowed",
    ):
        expect(card.get_by_text(text, exact=text in ("gate armed", "not allowed"))).to_be_visible()
    facts = card.locator("dl").first.inner_text()
    assert "qwen" in facts
    assert "llama" not in facts, "only models in memory"
    expect(page.get_by_text("All healthy")).to_be_visible()
    expect(
        page.get_by_text("1 of 1 Macs ready. Requests: 4 in flight, 1,234 queued. Models: 3.", exact=True)
    ).to_be_visible()
    expect(page.get_by_role("heading", level=1)).to_contain_text("home")


def test_a_bar_ends_at_the_cap(page: Page, api: Answers):
    api.sections["nodes"] = [node(current=90 * GIB, reserved=20 * GIB, margin=10 * GIB, leases=0, recent=200 * GIB)]
    show(page)
    bar = page.get_by_role("meter")
    ends = [float(bar.locator(f"rect.{name}").get_attribute("x") or 0) for name in ("margin", "lease")]
    assert ends == [pytest.approx(1000)] * 2
    assert float(bar.locator("rect.reserved").get_attribute("width") or 0) == pytest.approx(6 / 96 * 1000)
    assert float(bar.locator("rect.peak").get_attribute("x") or 0) == pytest.approx(997)


def test_every_state_of_a_mac_has_its_words_its_badge_and_its_buttons(page: Page, api: Answers):
    until = AT + 3600
    pause = {"when": "always", "paused": True, "why": "paused by ann", "until": until, "by_hand": True}
    api.sections["nodes"] = [
        node("cordoned", cordoned=True),
        node("silent", NodeState.SUSPECT, heard_seconds=5),
        node("drains", NodeState.DRAINING),
        node("lost", NodeState.LOST, heard_seconds=130),
        node("asleep", NodeState.ASLEEP, heard_seconds=10_800),
        node("paused", NodeState.PAUSED, sharing=pause),
        node("joins", NodeState.JOINING),
        node("gone", NodeState.LEFT),
        node("off", guard=False, gate_armed=False),
        node("inert", gate_armed=False),
        node("over", headroom=-2 * GIB, remedy="close a program"),
        node("blind", current=None, headroom=None),
        node("breaks", breaker={"state": "open", "why": "signal 6", "until": AT}),
        node("videos", video=node()["video"] | {"allowed": True, "cause": "no Ray"}),
    ]
    show(page)
    expect(page.get_by_role("region", name="gone")).to_have_count(0)
    words = {
        "cordoned": ("ready, cordoned", "gate armed"),
        "silent": ("suspect", "5.00 s ago"),
        "drains": ("draining",),
        "lost": ("lost", "Lost, last report 2 min ago. Check its power and network."),
        "asleep": ("asleep", "Asleep, last report 3 h ago."),
        "paused": ("paused", "paused by ann, until ", "Its memory is free for its owner."),
        "joins": ("joining", "Joining: the Mac gets requests after its first reports."),
        "off": ("guard off",),
        "inert": ("gate not armed",),
        "over": ("-2.0 GiB", "close a program"),
        "blind": ("unknown",),
        "breaks": ("signal 6",),
        "videos": ("allowed, not ready: no Ray",),
    }
    for name, texts in words.items():
        card = page.get_by_role("region", name=name, exact=True)
        for text in texts:
            expect(card).to_contain_text(text)
    for name, marked in (("over", 1), ("blind", 1), ("inert", 0)):
        headroom = page.get_by_role("region", name=name, exact=True).locator("p", has_text="headroom")
        expect(headroom.locator("b.bad")).to_have_count(marked)
    here = ["Cordon", "Drain", "Pause", "Allow video"]
    buttons = {
        "cordoned": ["Uncordon", *here[1:]],
        "silent": here,
        "drains": here,
        "off": here,
        "lost": ["Allow video", "Remove"],
        "asleep": ["Allow video", "Remove"],
        "paused": ["Resume", "Allow video"],
        "joins": ["Allow video"],
        "videos": [*here[:3], "Deny video"],
    }
    for name, wanted in buttons.items():
        card = page.get_by_role("region", name=name, exact=True)
        assert card.get_by_role("button").all_inner_texts() == wanted, name
    for name in ("lost", "asleep", "paused", "joins"):
        assert page.get_by_role("region", name=name, exact=True).get_by_role("meter").count() == 0, name
    expect(
        page.get_by_text("7 of 13 Macs ready, 1 joining, 1 paused, 1 asleep, 1 draining, 1 suspect, 1 lost, 1 cordoned")
    ).to_be_visible()
    notes = page.get_by_role("status").get_by_role("listitem").all_inner_texts()
    assert notes == [
        "silent has been silent for 5.00 s: it gets no new requests",
        "lost is lost: check its power and network",
        "breaks gets no requests: signal 6",
    ]


def test_conditions_dangers_and_warnings_are_listed_once_by_severity(page: Page, api: Answers):
    api.sections["nodes"] = [node("a", NodeState.LOST), node("b", breaker={"state": "open", "why": "x", "until": AT})]
    api.sections["status"] = status(dangers=["a: guard off"], warnings=["a: guard off", "b: engine hung"])
    api.sections["conditions"] = [
        {"name": "NodeDown", "severity": "critical", "node": "a", "summary": "a is lost", "remedy": "look"},
        {"name": "BreakerOpen", "severity": "warning", "node": "b", "summary": "b fails", "remedy": "read its log"},
    ]
    show(page)
    listed = page.get_by_role("status").get_by_role("listitem")
    assert listed.all_inner_texts() == [
        "a is lost – look Runbook: NodeDown",
        "b fails – read its log Runbook: BreakerOpen",
        "a: guard off",
        "b: engine hung",
    ]
    assert [one.get_attribute("class") for one in listed.all()] == ["bad", "warn", "bad", "warn"]
    expect(page.get_by_role("link", name="Runbook: NodeDown")).to_have_attribute("href", "#/runbook/NodeDown")
    expect(page.get_by_text("All healthy")).to_have_count(0)
    api.sections |= {
        "status": status(),
        "conditions": [],
        "nodes": [node("a", NodeState.LOST), node("b", cordoned=True)],
    }
    show(page)
    page.reload()
    expect(page.get_by_text("No Mac is ready: requests wait or are refused")).to_be_visible()


def test_charts_show_the_newest_values_of_the_load(page: Page, api: Answers):
    values = load(
        prompt_tokens_per_second=812.4,
        generated_tokens_per_second=9.25,
        in_flight=3,
        memory_bytes=40 * GIB,
        cap_bytes=96 * GIB,
        ttft_seconds=0.456,
        queued=17,
    )
    one = load(
        generated_tokens_per_second=5.5, in_flight=2, memory_bytes=20 * GIB, cap_bytes=48 * GIB, ttft_seconds=0.25
    )
    api.by_path["GET /api/v1/history"] = {
        "interval_seconds": 10,
        "number": 1,
        "at": AT,
        "pool": values,
        "nodes": {"studio": one},
    }
    show(page)
    total, card = (
        page.get_by_role("region", name="The pool in the last hour"),
        page.get_by_role("region", name="studio"),
    )
    for where, title, text in (
        (total, "Tokens per second", "generated 9.3, prompt 812"),
        (total, "Requests", "in flight 3, queued 17"),
        (total, "Memory", "40.0 GiB"),
        (total, "Time to first token", "0.46 s"),
        (card, "Tokens per second", "5.5"),
        (card, "Requests in flight", "2"),
        (card, "Memory", "20.0 GiB"),
        (card, "Time to first token", "0.25 s"),
    ):
        chart = where.locator("figure").filter(has=page.get_by_role("img", name=title))
        assert chart.locator("figcaption b").inner_text() == text, title
        expect(chart.get_by_role("img")).to_have_attribute(
            "aria-label", f"{title} in the last 10 minutes: now {text}; highest {highest(title, text)}"
        )
    expect(total.get_by_text("of 96.0 GiB", exact=True)).to_be_visible()


def test_a_missed_point_of_the_load_is_asked_for_again(page: Page, api: Answers):
    show(page)
    later = {"interval_seconds": 10, "number": 3, "at": AT + 20, "nodes": {}}
    missed = {name: [5.0, 500.0, value[-1]] for name, value in load(generated_tokens_per_second=7.0).items()}
    missed["ttft_seconds"] = [1.0, None, 2.0]
    api.by_path["GET /api/v1/history"] = later | {"pool": missed}
    api.sections["load"] = later | {"pool": {name: [value[-1]] for name, value in missed.items()}}
    total = page.get_by_role("region", name="The pool in the last hour")
    expect(total.get_by_role("img", name="Tokens per second")).to_have_attribute(
        "aria-label", re.compile("highest 500")
    )
    line = total.locator("figure").filter(has=page.get_by_role("img", name="Time to first token")).locator("path")
    assert (line.get_attribute("d") or "").count("M") == 2, "nothing is drawn where no value is known"


def test_a_point_after_a_whole_hour_takes_the_place_of_the_oldest(page: Page, api: Answers):
    hour = {name: [500.0, *[5.0] * 359] for name in load()}
    full = {"interval_seconds": 10, "number": 360, "at": AT, "pool": hour, "nodes": {"studio": hour}}
    api.by_path["GET /api/v1/history"] = full
    show(page)
    total, card = (
        page.get_by_role("region", name="The pool in the last hour").get_by_role("img", name="Requests"),
        page.get_by_role("region", name="studio").get_by_role("img", name="Requests in flight"),
    )
    label = "in the last 60 minutes: now"
    expect(total).to_have_attribute("aria-label", f"Requests {label} in flight 5, queued 5; highest 500")
    expect(card).to_have_attribute("aria-label", f"Requests in flight {label} 5; highest 500")
    newest = {name: [7.0] for name in load()}
    api.sections["load"] = full | {"number": 361, "at": AT + 10, "pool": newest, "nodes": {"studio": newest}}
    expect(total).to_have_attribute("aria-label", f"Requests {label} in flight 7, queued 7; highest 7")
    expect(card).to_have_attribute("aria-label", f"Requests in flight {label} 7; highest 7")


def highest(title: str, text: str) -> str:
    return {"generated 9.3, prompt 812": "812", "in flight 3, queued 17": "17"}.get(text, text)


def test_each_button_of_a_mac_sends_its_verb(page: Page, api: Answers):
    api.sections["nodes"] = [node("one"), node("two", cordoned=True), node("lost", NodeState.LOST)]
    show(page)
    one, two = (page.get_by_role("region", name=name) for name in ("one", "two"))

    def press(card: Locator, name: str) -> tuple[str, str, Any]:
        return sent(api, card.get_by_role("button", name=name, exact=True))

    assert press(one, "Cordon") == ("POST", "/api/v1/nodes/one/cordon", None)
    assert press(two, "Uncordon") == ("POST", "/api/v1/nodes/two/uncordon", None)
    assert press(one, "Drain") == ("POST", "/api/v1/nodes/one/drain", {})
    assert press(one, "Allow video") == ("POST", "/api/v1/nodes/one/allow-video", None)
    assert press(one, "Pause") == ("POST", "/api/v1/nodes/one/pause", {"seconds": 7200})
    for label, body in (
        ("1 hour", {"seconds": 3600}),
        ("8 hours", {"seconds": 28800}),
        ("1 day", {"seconds": 86400}),
        ("until resumed", {}),
    ):
        one.get_by_label("How long one is paused").select_option(label)
        assert press(one, "Pause") == ("POST", "/api/v1/nodes/one/pause", body)
    page.once("dialog", lambda dialog: dialog.dismiss())
    before = len(api.asked)
    page.get_by_role("button", name="Remove").click()
    page.wait_for_timeout(200)
    assert len(api.asked) == before, "nothing is removed without a yes"
    page.once("dialog", lambda dialog: dialog.accept())
    assert sent(api, page.get_by_role("button", name="Remove")) == ("DELETE", "/api/v1/nodes/lost", None)
    paused = node("p", NodeState.PAUSED, sharing=node()["sharing"] | {"paused": True, "by_hand": True})
    api.sections["nodes"] = [paused, node("v", video=node()["video"] | {"allowed": True})]
    page.reload()
    assert press(page.get_by_role("region", name="p"), "Resume") == ("POST", "/api/v1/nodes/p/resume", None)
    assert press(page.get_by_role("region", name="v"), "Deny video") == ("POST", "/api/v1/nodes/v/deny-video", None)
    api.by_path["POST /api/v1/nodes/v/cordon"] = "it is not a member any more"
    page.get_by_role("region", name="v").get_by_role("button", name="Cordon").click()
    expect(page.get_by_role("alert").get_by_text("it is not a member any more")).to_be_visible()


# models


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def place(name: str, held: str, **changes: Any) -> dict[str, Any]:
    """Return a copy of a model on a Mac, as in the API."""
    return {
        "id": name,
        "name": name,
        "state": "ready",
        "model": held,
        "cause": "",
        "progress": 0.0,
        "prefill_speed": 1234.4,
        "decode_speed": 56.6,
        "measured": None,
        "fingerprint": "f",
        "content": "",
        "identity": "content",
        "quantization": "4-bit",
        "stored": 16 * GIB,
        "used": 0.0,
        "removable": True,
    } | changes


def model(name: str, *nodes: dict[str, Any], **changes: Any) -> dict[str, Any]:
    size = {"weights": 17 * GIB, "context": 32768}
    return {"name": name, **size, "fingerprint": "f", "conflict": False, "nodes": list(nodes)} | changes


def wish(name: str, **changes: Any) -> dict[str, Any]:
    state = {"replicas": 2, "wanted": 2, "met": False, "ready": [], "loading": [], "away": [], "missing": ""}
    return {"model": name} | state | changes


def command(name: str, model: str, node: str | None, **changes: Any) -> dict[str, Any]:
    """Return a running command about a model, as in the live stream and in the response that starts it."""
    times = {"started": AT, "ended": None}
    of = {"id": f"command-{name}-{node}", "name": name, "model": model, "node": node}
    return of | {"state": "running", "message": "", "answer": None} | times | changes


def pull(name: str, *nodes: dict[str, Any], **changes: Any) -> dict[str, Any]:
    files = {"revision": "main", "commit": COMMIT, "size": 4 * GIB, "files": 7}
    times = {"state": "pulling", "started": AT, "ended": None, "mirror": "a"}
    return {"id": f"pull-{name}", "repo": f"lab/{name}", **files, **times, "nodes": list(nodes)} | changes


def pull_node(name: str, state: str = "pulling", **changes: Any) -> dict[str, Any]:
    numbers = {"done": 1 * GIB, "total": 4 * GIB, "speed": 40 * MIB, "seconds_left": 76.8, "fetched": 1 * GIB}
    source = {"phase": "downloading", "source": "hub", "linked": True, "retries": 0, "message": ""}
    return {"id": name, "name": name, "state": state, **numbers, **source} | changes


def lines(listed: Locator) -> list[str]:
    return [" ".join(text.split()) for text in listed.get_by_role("listitem").all_inner_texts()]


def test_models_show_where_they_are_and_what_they_take(page: Page, api: Answers):
    measured = {
        "max_context": 8192,
        "max_batch": 6,
        "kv_per_token": 64 * KIB,
        "transient": 1,
        "residual": 1,
        "covered": 1,
    }
    api.sections["models"] = [
        model(
            "qwen",
            place("a", "loaded", measured=measured),
            place("b", "known", identity="sampled", quantization=""),
            place("c", "loading", progress=0.375, identity="differs"),
            place("d", "failed", cause="no such file", removable=False, stored=0),
            place("e", "loaded", state="lost"),
            place("f", "loaded", state="left"),
            conflict=True,
        )
    ]
    show(page, "models")
    card = page.get_by_role("region", name="qwen")
    expect(card).to_contain_text("17.0 GiB, context of 32,768 tokens")
    expect(card).to_contain_text("Macs have different models with this name")
    assert lines(card) == [
        "a: loaded Unload Verify 16.0 GiB, 4-bit, same content, never used prefill 1,234 tokens/s, decode 57 tokens/s "
        "for one request measured: up to 8,192 tokens in one request, 6 concurrent requests, 64.0 KiB per token",
        "b: on disk Load Verify Delete 16.0 GiB, same samples, never used",
        "c: loading Verify 16.0 GiB, 4-bit, DIFFERS, never used",
        "d: cannot load Load no such file 4-bit, never used",
        "e: lost",
    ]
    expect(card.get_by_role("progressbar", name="Loading qwen on c")).to_have_attribute("value", "0.375")
    api.by_path["POST /api/v1/models/load"] = {"command": command("load", "qwen", "b")}
    unload, load_b = (
        card.get_by_role("button", name="Unload qwen on a"),
        card.get_by_role("button", name="Load qwen on b"),
    )
    assert sent(api, unload) == ("POST", "/api/v1/models/unload", {"model": "qwen", "node": "a"})
    assert sent(api, load_b) == ("POST", "/api/v1/models/load", {"model": "qwen", "node": "b"})
    anywhere = card.get_by_role("button", name="Load on the best Mac")
    api.by_path["POST /api/v1/models/load"] = {"command": command("load", "qwen", None)}
    assert sent(api, anywhere) == ("POST", "/api/v1/models/load", {"model": "qwen"})
    expect(anywhere).to_be_disabled()
    ended = {"state": "completed", "answer": {"node": {"id": "b", "name": "b"}}}
    api.sections["commands"] = [command("load", "qwen", None, **ended)]
    expect(page.get_by_role("status").get_by_text("qwen is loaded on b.")).to_be_visible()
    expect(anywhere).to_be_enabled()
    api.by_path["POST /api/v1/models/load"] = "18.0 GiB are needed and 3.0 GiB are there"
    card.get_by_role("button", name="Load qwen on d").click()
    expect(page.get_by_role("alert").get_by_text("18.0 GiB are needed and 3.0 GiB are there")).to_be_visible()


def test_commands_of_minutes_hold_no_connection_and_their_failures_are_shown(page: Page, api: Answers):
    names = [f"mac{number}" for number in range(8)]
    api.sections["models"] = [model("qwen", *(place(name, "known") for name in names))]
    show(page, "models")
    card = page.get_by_role("region", name="qwen")
    for name in names:
        verify = card.get_by_role("button", name=f"Verify qwen on {name}")
        api.by_path["POST /api/v1/models/verify"] = {"command": command("verify", "qwen", name)}
        with page.expect_request_finished(lambda request: request.url.endswith("/verify")) as finished:
            verify.click()
        assert finished.value.headers["prefer"] == "respond-async"
        expect(verify).to_be_disabled()
    api.sections["commands"] = [command("verify", "qwen", name) for name in names[1:]]
    api.sections["commands"].append(command("verify", "qwen", "mac0", state="failed", message="mac0: other content"))
    expect(card.get_by_role("alert")).to_have_text("mac0: other content")
    expect(card.get_by_role("button", name="Verify qwen on mac0")).to_be_enabled()
    expect(card.get_by_text("Reading all files …")).to_have_count(7)
    page.reload()
    expect(card.get_by_role("alert")).to_have_text("mac0: other content")
    expect(card.get_by_text("Reading all files …")).to_have_count(7)


def test_the_files_of_a_model_are_verified_and_deleted_after_a_confirmation(page: Page, api: Answers):
    api.sections["models"] = [model("qwen", place("a", "known", used=AT), place("b", "known", stored=3 * GIB))]
    answer = {"content": "abcdef0123456789", "freed": 0, "node": {"id": "a", "name": "a"}}
    verified = command("verify", "qwen", "a", state="completed", answer=answer)
    api.by_path["POST /api/v1/models/verify"] = {"command": verified}
    api.sections["commands"] = [verified]
    show(page, "models")
    card = page.get_by_role("region", name="qwen")
    assert "last request" in lines(card)[0]
    verify = card.get_by_role("button", name="Verify qwen on a")
    assert sent(api, verify) == ("POST", "/api/v1/models/verify", {"model": "qwen", "node": "a"})
    expect(page.get_by_text("qwen on a: all files read, content abcdef012345.")).to_be_visible()
    api.by_path["POST /api/v1/models/verify"] = "b: model.safetensors has other content: pull it again"
    card.get_by_role("button", name="Verify qwen on b").click()
    expect(card.get_by_role("alert")).to_have_text("b: model.safetensors has other content: pull it again")
    asked, before = list[str](), len(api.asked)

    def refuse(dialog: Dialog) -> None:
        asked.append(dialog.message)
        dialog.dismiss()

    page.once("dialog", refuse)
    remove = card.get_by_role("button", name="Delete qwen on b")
    remove.click()
    page.wait_for_timeout(200)
    assert (asked, len(api.asked)) == (["Delete qwen on b? Its files of 3.0 GiB are removed from the disk."], before)
    answer = {"content": "", "freed": 2 * GIB, "node": {"id": "b", "name": "b"}}
    removed = command("remove", "qwen", "b", state="completed", answer=answer)
    api.by_path["POST /api/v1/models/remove"] = {"command": removed}
    api.sections["commands"] = [removed]
    page.once("dialog", lambda dialog: dialog.accept())
    assert sent(api, remove) == ("POST", "/api/v1/models/remove", {"model": "qwen", "node": "b"})
    expect(page.get_by_role("status").get_by_text("qwen on b is deleted, 2.0 GiB freed.")).to_be_visible()


def test_the_ends_of_commands_that_come_together_are_all_shown(page: Page, api: Answers):
    api.sections["models"] = [model("qwen", place("a", "loaded"), place("b", "known"))]
    show(page, "models")
    card = page.get_by_role("region", name="qwen")
    api.by_path["POST /api/v1/models/unload"] = {"command": command("unload", "qwen", "a")}
    sent(api, card.get_by_role("button", name="Unload qwen on a"))
    api.by_path["POST /api/v1/models/verify"] = {"command": command("verify", "qwen", "b")}
    sent(api, card.get_by_role("button", name="Verify qwen on b"))
    answers = {"a": {"nodes": [{"id": "a", "name": "a"}]}, "b": {"content": "0" * 64, "node": {"id": "b", "name": "b"}}}
    api.sections["commands"] = [
        command(name, "qwen", node, state="completed", answer=answers[node], ended=AT)
        for name, node in (("verify", "b"), ("unload", "a"))
    ]
    note = page.get_by_role("status").filter(has_text="is unloaded")
    expect(note).to_have_text("qwen on b: all files read, content 000000000000. qwen on a is unloaded.")


def test_wishes_show_their_missing_number_and_are_changed_without_the_loss_of_their_rules(page: Page, api: Answers):
    api.sections["models"] = [model("qwen", place("a", "loaded")), model("lab/llama", place("a", "known"))]
    api.sections["wishes"] = [
        wish("qwen", ready=["a"], loading=["b"], away=["c"], missing="needs 1 more node: d is paused"),
        wish("Lab/Llama", replicas=1, wanted=0, met=True),
        wish("lab/none", missing="needs 2 nodes with the model on disk, none have it: pull it to another node"),
    ]
    kept = {"labels": ["lab"], "allow": [], "deny": ["b"], "idle_unload_seconds": 60, "eviction_cost": 7}
    path = "/api/v1/models/wishes/"
    api.by_path[f"GET {path}qwen"] = {"wish": {"model": "qwen", "replicas": 2, "load_at_boot": False, **kept}}
    show(page, "models")
    cards = {name: page.get_by_role("region", name=name, exact=True) for name in ("qwen", "lab/llama", "lab/none")}
    for name, text in (
        ("qwen", "wish not met 2 replicas wanted, 1 ready (a), loading on b, c away needs 1 more node: d is paused"),
        ("lab/llama", "wish met 1 replica wanted, unloaded until the next request"),
        ("lab/none", "No Mac has this model. wish not met 2 replicas wanted, 0 ready needs 2 nodes with the model"),
    ):
        assert text in " ".join(cards[name].inner_text().split())
    cards["qwen"].get_by_label("Replicas of qwen").fill("3")
    change = cards["qwen"].get_by_role("button", name="Change the wish for qwen")
    assert sent(api, change) == ("PUT", f"{path}qwen", {"replicas": 3, "load_at_boot": False, **kept})
    expect(page.get_by_role("status").get_by_text("qwen: 3 replicas wanted.")).to_be_visible()
    unwant = cards["lab/none"].get_by_role("button", name="Unwant lab/none")
    assert sent(api, unwant) == ("DELETE", f"{path}lab/none", None)
    api.sections["wishes"] = []
    page.reload()
    want = cards["lab/llama"].get_by_role("button", name="Want lab/llama")
    assert sent(api, want) == ("PUT", f"{path}lab/llama", {"replicas": 1})


def test_a_search_finds_models_and_aliases_and_disks_show_their_free_bytes(page: Page, api: Answers):
    api.sections["models"] = [model(name, place("a", "known")) for name in ("lab/Qwen3-8B", "lab/llama", "qwen-small")]
    api.sections["aliases"] = [
        {"name": "coder", "candidates": ["lab/Qwen3-8B", "qwen-small"], "upstream": "cloud", "served": "qwen-small"},
        {"name": "qwen", "candidates": ["nothing"], "upstream": None, "served": None},
    ]
    api.sections["nodes"] = [
        node(disk={"free": 300 * GIB, "total": 900 * GIB, "folder": "/x"}),
        node("lost", NodeState.LOST, disk={"free": 1, "total": 2, "folder": ""}),
        node("outdated"),
    ]
    show(page, "models")
    rows = page.get_by_role("region", name="Aliases of models").get_by_role("row")
    assert [cells(row) for row in rows.all()[1:]] == [
        ["coder", "lab/Qwen3-8B, then qwen-small, then upstream cloud", "qwen-small"],
        ["qwen", "nothing", "none"],
    ]
    disks = page.get_by_role("region", name="Disks")
    assert " ".join(disks.inner_text().split()) == "Disks studio 300.0 GiB of 900.0 GiB free"
    expect(page.get_by_text("3 of 3 models")).to_be_visible()
    page.get_by_label("Search").fill(" QWEN ")
    expect(page.get_by_text("2 of 3 models")).to_be_visible()
    expect(page.get_by_role("region", name="lab/llama")).to_have_count(0)
    expect(page.get_by_role("region", name="lab/Qwen3-8B")).to_be_visible()
    assert [cells(row)[0] for row in rows.all()[1:]] == ["qwen"]


def plan(*nodes: dict[str, Any]) -> dict[str, Any]:
    """Return a plan of a pull, as in the API."""
    described = {"architecture": "qwen3", "quantization": "4-bit", "weights": 1, "kv_per_token": 1, "context": 40960}
    files = {"size": 4 * GIB, "files": 7, "skipped": {"files": 2, "size": 1 * MIB}}
    return {"repo": "lab/qwen", "revision": "main", "commit": COMMIT, **files, "model": described, "nodes": list(nodes)}


def plan_node(name: str, reason: str = "", **changes: Any) -> dict[str, Any]:
    numbers = {"has_model": False, "disk_free": 300 * GIB, "max_context": 40960}
    return {"id": name, "name": name, "state": "ready", "chosen": not reason, **numbers, "reason": reason} | changes


def test_a_pull_is_planned_for_the_chosen_macs_before_it_starts(page: Page, api: Answers):
    full = "needs 4.0 GiB of disk, has 2.0 GiB free and keeps 1.0 GiB"
    api.by_path["POST /api/v1/pulls"] = plan(plan_node("a"), plan_node("b", full, disk_free=0, max_context=0))
    show(page, "models")
    card = page.get_by_role("region", name="Pull a model")
    ask, body = (
        card.get_by_role("button", name="Show the plan"),
        {"repo": "lab/qwen", "revision": "v1", "dry_run": True},
    )
    expect(ask).to_be_disabled()
    card.get_by_label("Repository").fill(" lab/qwen ")
    card.get_by_label("Revision").fill("v1")
    assert sent(api, ask) == ("POST", "/api/v1/pulls", body | {"nodes": [], "all": False})
    expect(card).to_contain_text(
        "lab/qwen at 01234567: 4.0 GiB in 7 files, 4-bit, context of 40,960 tokens. Not needed: 2 files, 1.0 MiB."
    )
    rows = card.get_by_role("region", name="Plan of the pull").get_by_role("row")
    assert [cells(row) for row in rows.all()[1:]] == [
        ["a", "yes", "300.0 GiB", "40,960"],
        ["b", f"no: {full}", "unknown", "–"],
    ]
    expect(card.get_by_role("button", name="Pull to 1 Mac")).to_be_enabled()
    away = "is asleep, and starts the pull when it is back"
    api.by_path["POST /api/v1/pulls"] = plan(plan_node("a"), plan_node("b", away, chosen=True))
    everyone = card.get_by_label("Every Mac with room, including offline Macs")
    assert sent(api, everyone) == ("POST", "/api/v1/pulls", body | {"nodes": [], "all": True})
    expect(rows.nth(2).get_by_role("cell").nth(1)).to_have_text(f"yes: {away}")
    expect(card.get_by_role("button", name="Pull to 2 Macs")).to_be_enabled()
    before = len(api.asked)
    card.get_by_label("These Macs:").check()
    page.wait_for_timeout(100)
    expect(card.get_by_role("button", name="Pull to 0 Macs")).to_be_disabled()
    assert len(api.asked) == before, "without a name there is no plan"
    api.by_path["POST /api/v1/pulls"] = plan(plan_node("a", "was not named"), plan_node("b")) | {"pull": pull("qwen")}
    tick = card.get_by_label("Pull to b")
    assert sent(api, tick) == ("POST", "/api/v1/pulls", body | {"nodes": ["b"], "all": False})
    start = card.get_by_role("button", name="Pull to 1 Mac")
    expect(start).to_be_enabled()
    assert sent(api, start) == (
        "POST",
        "/api/v1/pulls",
        {"repo": "lab/qwen", "revision": "v1", "nodes": ["b"], "all": False},
    )
    expect(page.get_by_role("status").get_by_text("The pull of lab/qwen has started.")).to_be_visible()
    expect(card.get_by_label("Repository")).to_have_value("")
    expect(rows).to_have_count(0)
    card.get_by_label("Repository").fill("lab/qwen")
    card.get_by_label("Revision").fill("v1")
    assert sent(api, ask) == ("POST", "/api/v1/pulls", body | {"nodes": [], "all": False}), "a new pull, a new choice"
    api.by_path["POST /api/v1/pulls"] = "16 pulls are open, which is the limit: wait for one to end"
    card.get_by_role("button", name="Pull to 1 Mac").click()
    expect(card.get_by_role("alert")).to_have_text("16 pulls are open, which is the limit: wait for one to end")
    card.get_by_role("button", name="Close").click()
    expect(card.get_by_role("alert")).to_have_count(0)


def test_a_late_answer_to_an_earlier_choice_does_not_replace_the_plan(page: Page, api: Answers):
    api.by_path["POST /api/v1/pulls"] = plan(plan_node("a"))
    show(page, "models")
    card = page.get_by_role("region", name="Pull a model")
    card.get_by_label("Repository").fill("lab/qwen")
    card.get_by_role("button", name="Show the plan").click()
    expect(card.get_by_role("button", name="Pull to 1 Mac")).to_be_enabled()
    held: list[Route] = []

    def answer(route: Route) -> None:
        if json.loads(route.request.post_data or "{}")["all"]:
            held.append(route)
        else:
            route.fulfill(json=plan(plan_node("a"), plan_node("b"), plan_node("c")))

    page.route("**/api/v1/pulls", answer)
    with page.expect_request("**/api/v1/pulls"):
        card.get_by_label("Every Mac with room, including offline Macs").check()
    card.get_by_label("Every linked Mac with room").check()
    newest = card.get_by_role("button", name="Pull to 3 Macs")
    expect(newest).to_be_enabled()
    with page.expect_event("requestfinished", lambda request: request == held[0].request):
        held[0].fulfill(json=plan(plan_node("a"), plan_node("b")))
    page.evaluate(SETTLED)
    expect(newest).to_be_enabled()


def test_a_refused_plan_is_shown_as_the_sentence_of_the_coordinator(page: Page, api: Answers):
    api.by_path["POST /api/v1/pulls"] = "lab/gated is gated: accept its terms on its page, and set hub.token_file"
    show(page, "models")
    card = page.get_by_role("region", name="Pull a model")
    card.get_by_label("Repository").fill("lab/gated")
    card.get_by_role("button", name="Show the plan").click()
    expect(card.get_by_role("alert")).to_have_text(api.by_path["POST /api/v1/pulls"])
    expect(card.get_by_role("button")).to_have_text(["Show the plan"])


def test_pulls_show_bytes_speed_source_and_faults_and_are_cancelled(page: Page, api: Answers):
    lost = "the hub answers 403: accept the terms"
    api.sections["pulls"] = [
        pull(
            "qwen",
            pull_node("a"),
            pull_node("b", source="mirror", done=512 * MIB, seconds_left=2.2),
            pull_node("c", "waiting"),
            pull_node("d", "waiting", linked=False, message="the link was lost"),
            pull_node("e", phase="verifying", seconds_left=None),
            pull_node("f", total=0),
        ),
        pull("gated", pull_node("a", "failed", message=lost), state="failed", ended=time.time() - 60),
        pull("old", pull_node("a", "completed"), pull_node("b", "completed", fetched=0), state="completed", ended=AT),
    ]
    show(page, "models")
    cards = {name: page.get_by_role("group", name=f"Pull of lab/{name}") for name in ("qwen", "gated", "old")}
    expect(cards["qwen"]).to_contain_text("main at 01234567, 4.0 GiB in 7 files, started ")
    assert lines(cards["qwen"]) == [
        "a: pulling 1.0 GiB of 4.0 GiB from the hub, 40.0 MiB/s, 77 s left",
        "b: pulling 512.0 MiB of 4.0 GiB from a, 40.0 MiB/s, 3 s left",
        "c: waiting for a source",
        "d: waiting until the Mac is back the link was lost",
        "e: pulling verifying, 1.0 GiB of 4.0 GiB from the hub, 40.0 MiB/s",
        "f: pulling starting",
    ]
    expect(page.get_by_role("progressbar", name="Pull of lab/qwen to b")).to_have_attribute("value", "0.125")
    assert cards["gated"].get_by_role("alert").all_inner_texts() == [lost]
    expect(cards["gated"].get_by_role("button")).to_have_count(0)
    expect(cards["old"]).to_be_hidden()
    page.get_by_text("Older pulls: 1").click()
    assert lines(cards["old"]) == ["a: completed 1.0 GiB received", "b: completed already had the files"]
    cancel = cards["qwen"].get_by_role("button", name="Cancel the pull of lab/qwen")
    assert sent(api, cancel) == ("DELETE", "/api/v1/pulls/pull-qwen", None)
    api.by_path["DELETE /api/v1/pulls/pull-qwen"] = "pull-qwen has ended already"
    cancel.click()
    expect(cards["qwen"].get_by_role("alert")).to_have_text("pull-qwen has ended already")


def test_a_key_for_metrics_sees_models_wishes_and_pulls_without_any_action(page: Page, api: Answers):
    api.by_path["GET /api/v1/key"] = OWN | {"scopes": ["metrics"]}
    api.sections["models"] = [model("qwen", place("a", "known"), place("b", "loaded"))]
    api.sections["wishes"] = [wish("qwen"), wish("none")]
    api.sections["pulls"] = [pull("qwen", pull_node("a"))]
    show(page, "models")
    expect(page.get_by_role("group", name="Pull of lab/qwen")).to_be_visible()
    expect(page.get_by_role("region", name="qwen", exact=True)).to_contain_text("wish not met")
    expect(page.get_by_role("region", name="Pull a model")).to_have_count(0)
    expect(page.get_by_role("main").get_by_role("button")).to_have_count(0)
    expect(page.get_by_role("main").get_by_role("spinbutton")).to_have_count(0)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_models_with_wishes_and_pulls_are_accessible_and_fit_on_a_phone(page: Page, api: Answers, theme: Any):
    long_name = "mlx-community/Qwen3-Coder-480B-A35B-Instruct-4bit"
    api.sections["models"] = [
        model(long_name, place("a", "loaded"), place("b", "known", identity="differs"), conflict=True),
        model("qwen", place("a", "failed", cause="GGUF files are not served"), place("b", "loading")),
    ]
    api.sections["wishes"] = [wish(long_name, missing="needs 2 nodes, the pool has 1"), wish("none", met=True)]
    api.sections["aliases"] = [{"name": "coder", "candidates": [long_name, "qwen"], "upstream": None, "served": None}]
    api.sections["pulls"] = [
        pull(long_name, pull_node("a"), pull_node("b", "waiting", message="the link was lost")),
        pull(long_name, pull_node("a", "failed", message="gated"), id="pull-2", state="failed", ended=time.time()),
    ]
    api.by_path["POST /api/v1/pulls"] = plan(plan_node("a"), plan_node("b", "needs 4.0 GiB of disk, has 2.0 GiB free"))
    page.set_viewport_size({"width": 360, "height": 800})
    page.emulate_media(color_scheme=theme)
    show(page, "models")
    card = page.get_by_role("region", name="Pull a model")
    card.get_by_label("Repository").fill("lab/qwen")
    page.keyboard.press("Enter")
    card.get_by_label("These Macs:").check()
    expect(card.get_by_label("Pull to b")).to_be_visible()
    sound(page, "the models view on a phone")


# requests


def ended(name: str, outcome: str = "ok", **changes: Any) -> dict[str, Any]:
    return {
        "request_id": name,
        "key": "laptop",
        "model": "qwen",
        "outcome": outcome,
        "message": "",
        "seconds": 12.3,
        "prompt_tokens": 1001,
        "cached_tokens": 102,
        "completion_tokens": 203,
        "node": "studio",
        "at": AT,
        "ttft_seconds": 0.45,
        "tokens_per_second": 17.6,
    } | changes


def test_requests_in_flight_and_ended_have_every_value_in_its_column(page: Page, api: Answers):
    api.sections["requests"] = [
        {
            "id": "r1",
            "key": "app",
            "model": "tiny",
            "node": "mini",
            "phase": "decoding",
            "prompt_tokens": 2001,
            "cached_tokens": 302,
            "completion_tokens": 43,
            "attempts": 2,
            "stream": True,
            "at": AT,
        }
    ]
    api.sections["ended"] = [
        ended("r2"),
        ended("r3", "no_headroom", message="no room", node="", ttft_seconds=None, tokens_per_second=None),
        ended("r4", "engine_crashed", key="server"),
        ended("r5", "cancelled", model="llama"),
    ]
    show(page, "requests")
    row = page.get_by_role("region", name="Requests in flight").get_by_role("row").nth(1)
    assert cells(row)[1:] == ["r1", "app", "tiny", "mini", "decoding", "2,001", "302", "43", "2"]
    rows = page.get_by_role("region", name="Ended requests").get_by_role("row")
    expect(rows).to_have_count(5)
    found = [[" ".join(cell.split()) for cell in cells(row)[1:]] for row in rows.all()[1:]]
    assert [row[0] for row in found] == ["r5", "r4", "r3", "r2"], "the newest first"
    assert found[3] == ["r2", "laptop", "qwen", "studio", "ok", "0.45 s", "18", "12 s", "1,001", "102", "203"]
    assert found[2] == ["r3", "laptop", "qwen", "–", "no_headroom no room", "–", "–", "12 s", "1,001", "102", "203"]
    for kind, ids in (
        ("ok", ["r2"]),
        ("refused", ["r3"]),
        ("failed", ["r4"]),
        ("cancelled", ["r5"]),
        ("all", ["r5", "r4", "r3", "r2"]),
    ):
        page.get_by_label("Outcome").select_option(kind)
        expect(rows).to_have_count(1 + len(ids))
        assert [cells(row)[1] for row in rows.all()[1:]] == ids
        expect(page.get_by_text(f"{len(ids)} of 4", exact=True)).to_be_visible()
    for text, name in (("SERVER", "r4"), ("llama", "r5"), ("no room", "r3"), ("r2", "r2")):
        page.get_by_label("Filter").fill(text)
        expect(rows).to_have_count(2)
        assert cells(rows.nth(1))[1] == name
    page.get_by_label("Filter").fill("nothing")
    expect(page.get_by_text("No request matches the filter.")).to_be_visible()
    page.get_by_label("Filter").fill("")
    older = {**ended("r0"), "key_name": "older"}
    api.by_path["GET /api/v1/requests"] = {"requests": [older, ended("r2") | {"key_name": "laptop"}]}
    page.get_by_role("button", name="Load the newest 1,000").click()
    expect(rows).to_have_count(6)
    assert cells(rows.nth(5))[1:3] == ["r0", "older"]


def test_requests_that_left_the_live_stream_stay_in_the_loaded_list(page: Page, api: Answers):
    api.sections["ended"] = [ended("r1")]
    named = [ended(f"r{number}") | {"key_name": "laptop"} for number in (1, 2, 3)]
    api.by_path["GET /api/v1/requests"] = {"requests": named[:1]}
    show(page, "requests")
    rows = page.get_by_role("region", name="Ended requests").get_by_role("row")
    with page.expect_response("**/api/v1/requests?last=1000"):
        page.get_by_role("button", name="Load the newest 1,000").click()
    expect(rows).to_have_count(2)
    api.by_path["GET /api/v1/requests"] = {"requests": named}
    api.sections["ended"] = [ended("r3")]
    expect(rows).to_have_count(4)
    assert [cells(row)[1] for row in rows.all()[1:]] == ["r3", "r2", "r1"]


def test_the_loaded_list_is_in_the_order_of_its_ends_and_has_requests_with_the_id_of_an_older_one(
    page: Page, api: Answers
):
    """The list is loaded after requests ended that the live stream has not shown yet."""
    api.sections["ended"] = [ended("r1"), ended("r1", prompt_tokens=7)]
    named = [ended(name) | {"key_name": "laptop"} for name in ("r0", "r1", "r2")]
    api.by_path["GET /api/v1/requests"] = {"requests": named}
    show(page, "requests")
    page.get_by_role("button", name="Load the newest 1,000").click()
    rows = page.get_by_role("region", name="Ended requests").get_by_role("row")
    expect(rows).to_have_count(5)
    assert [cells(row)[1] for row in rows.all()[1:]] == ["r1", "r2", "r1", "r0"]


def test_every_code_of_an_end_is_a_refusal_a_failure_or_a_cancel(page: Page, api: Answers):
    refused = {code.value for code in RefusalCode}
    cancelled = {FailureCode.CANCELLED.value, FailureCode.SLOW_CLIENT.value}
    failed = {code.value for code in FailureCode} - refused - cancelled
    api.sections["ended"] = [ended(code, code) for code in sorted(refused | failed | cancelled)]
    show(page, "requests")
    rows = page.get_by_role("region", name="Ended requests").get_by_role("row")
    for kind, codes in (("refused", refused), ("failed", failed), ("cancelled", cancelled)):
        page.get_by_label("Outcome").select_option(kind)
        expect(rows).to_have_count(1 + len(codes))
        assert {cells(row)[1] for row in rows.all()[1:]} == codes


def test_one_request_is_explained_with_the_arithmetic_of_each_mac(page: Page, api: Answers):
    steps = [{"at": 0.25, "what": "sent", "node": "studio"}, {"at": 130.0, "what": "first token", "node": "studio"}]
    candidate = {
        "state": "ready",
        "need": 3 * GIB,
        "headroom": 9 * GIB,
        "expected_ttft_seconds": 1.5,
        "expected_answer_seconds": 20.0,
        "chosen": False,
        "why_not": "",
    }
    api.by_path["GET /api/v1/requests/r%201"] = {
        "under_way": [],
        "requests": [ended("r 1") | {"key_name": "laptop", "steps": steps}],
        "decisions": [
            {
                "seconds_ago": 61.0,
                "nodes": 3,
                "refused": "",
                "candidates": [
                    candidate | {"node": "a", "name": "a", "chosen": True},
                    candidate | {"node": "b", "name": "b"},
                    candidate | {"node": "c", "name": "c", "why_not": "no room", "headroom": 1 * GIB},
                    candidate | {"node": "d", "name": "d", "state": "lost", "why_not": "lost"},
                ],
            }
        ],
    }
    show(page, "requests/r%201")
    text = " ".join(page.locator("main").inner_text().split())
    for words in (
        "qwen: ok after 12 s.",
        "key laptop",
        "Mac studio",
        "time to first token 0.45 s",
        "decode 18 tokens/s",
        "1,001 prompt, 102 of them cached, 203 generated",
        "Decision 61 s ago, among 3 Macs",
    ):
        assert words in text, words
    rows = page.get_by_role("region", name="Macs").get_by_role("row")
    assert [cells(row) for row in rows.all()[1:]] == [
        ["a", "3.0 GiB", "9.0 GiB", "1.50 s", "20 s", "chosen"],
        ["b", "3.0 GiB", "9.0 GiB", "1.50 s", "20 s", "fits"],
        ["c", "3.0 GiB", "1.0 GiB", "1.50 s", "20 s", "no room"],
        ["d", "–", "–", "–", "–", "lost"],
    ]
    listed = page.get_by_role("region", name="Steps").get_by_role("row")
    assert [cells(row) for row in listed.all()[1:]] == [
        ["0.25 s", "sent", "studio"],
        ["2 min", "first token", "studio"],
    ]


def test_the_view_of_a_request_in_flight_follows_it_to_its_end(page: Page, api: Answers):
    flying = {"id": "r1", "phase": "decode"}
    api.sections["requests"] = [flying]
    path = "GET /api/v1/requests/r1"
    now = {"request_id": "r1", "model": "qwen", "phase": "decode", "seconds": 3.0, "steps": []}
    api.by_path[path] = {"under_way": [now], "requests": [], "decisions": []}
    show(page, "requests/r1")
    expect(page.get_by_text("qwen: decode, for 3.00 s.")).to_be_visible()
    done = ended("r1") | {"key_name": "laptop", "steps": []}
    api.by_path[path] = {"under_way": [], "requests": [done], "decisions": []}
    api.sections["requests"] = []
    expect(page.get_by_text("qwen: ok after 12 s.")).to_be_visible()


# keys and usage


KEY = {
    "id": "k1",
    "name": "app",
    "scopes": ["infer"],
    "created": AT,
    "expires": AT + 60,
    "limits": {
        "models": ["qwen*"],
        "labels": [],
        "requests_per_minute": 10,
        "tokens_per_minute": None,
        "concurrency": 2,
        "waiting": None,
        "priority": "high",
    },
}


def used(day: str, key: str = "k1", **changes: Any) -> dict[str, Any]:
    return {
        "day": day,
        "key": key,
        "name": "app",
        "model": "qwen",
        "requests": 5,
        "failed": 1,
        "prompt_tokens": 1000,
        "cached_tokens": 400,
        "completion_tokens": 70,
    } | changes


def test_a_change_of_one_limit_keeps_a_limit_that_has_no_field(page: Page, api: Answers):
    private = KEY | {"limits": {"concurrency": 2, "upstreams": False}}
    api.by_path |= {"GET /api/v1/keys": {"keys": [private]}, "GET /api/v1/keys/usage": {"usage": []}}
    show(page, "keys")
    page.get_by_role("region", name="API keys").get_by_role("button", name="Edit").click()
    edit = page.get_by_role("region", name="Edit app")
    edit.get_by_label("Concurrent requests").fill("3")
    assert sent(api, edit.get_by_role("button", name="Save"))[2] == {"limits": {"concurrency": 3, "upstreams": False}}


def test_a_keys_row_shows_its_limits_and_its_buttons_send_what_was_changed_alone(page: Page, api: Answers):
    later = KEY | {"id": "k3", "name": "later", "expires": 4_000_000_000}
    api.by_path |= {"GET /api/v1/keys": {"keys": [KEY, later]}, "GET /api/v1/keys/usage": {"usage": []}}
    api.by_path["POST /api/v1/keys"] = {"id": "k2", "key": "mp_k2_secret"}
    api.by_path["POST /api/v1/keys/k1/rotate"] = {"id": "k1", "key": "mp_k1_other"}
    show(page, "keys")
    keys = page.get_by_role("region", name="API keys")
    row = keys.get_by_role("row").nth(1)
    found = cells(row)
    assert (found[0], found[1], found[2]) == ("app", "k1", "infer")
    assert found[4].startswith("expired ")
    assert "2096" in cells(keys.get_by_role("row").nth(2))[4]
    assert "expired" not in cells(keys.get_by_role("row").nth(2))[4]
    assert found[5] == "models: qwen*; requests per minute: 10; concurrency: 2; priority: high"
    make = page.get_by_role("region", name="Create a key")
    make.get_by_label("Name", exact=True).fill("kitchen")
    make.get_by_label("Scope").select_option("metrics")
    make.get_by_label("Expires").select_option("in 30 days")
    make.get_by_text("Models and limits").click()
    make.get_by_label("Models", exact=True).fill("qwen*, llama-8b")
    make.get_by_label("Tokens per minute").fill("5000")
    make.get_by_label("Queued requests").fill("0")
    make.get_by_label("Priority").select_option("low")
    assert sent(api, make.get_by_role("button", name="Create")) == (
        "POST",
        "/api/v1/keys",
        {
            "name": "kitchen",
            "scopes": ["metrics"],
            "ttl_seconds": 2592000,
            "limits": {"priority": "low", "tokens_per_minute": 5000, "waiting": 0, "models": ["qwen*", "llama-8b"]},
        },
    )
    expect(make.get_by_text("mp_k2_secret")).to_be_visible()
    api.by_path["POST /api/v1/keys/k3/rotate"] = {"id": "k3", "key": "mp_k3_other"}
    page.once("dialog", lambda dialog: dialog.accept())
    keys.get_by_role("row").nth(2).get_by_role("button", name="Rotate").click()
    expect(keys.get_by_text("mp_k3_other")).to_be_visible()
    expect(make.get_by_text("mp_k2_secret")).to_be_visible()
    page.once("dialog", lambda dialog: dialog.accept())
    keys.get_by_role("row").nth(2).get_by_role("button", name="Revoke").click()
    expect(keys.get_by_text("mp_k3_other")).to_have_count(0)
    row.get_by_role("button", name="Edit").click()
    edit = page.get_by_role("region", name="Edit app")
    edit.get_by_label("Concurrent requests").fill("3")
    assert sent(api, edit.get_by_role("button", name="Save")) == (
        "PUT",
        "/api/v1/keys/k1/limits",
        {
            "limits": {"priority": "high", "requests_per_minute": 10, "concurrency": 3, "models": ["qwen*"]},
        },
    )
    expect(edit).to_have_count(0)
    changes = [path.removeprefix("/api/v1/keys/k1/") for method, path, _ in api.asked if method == "PUT"]
    assert changes == ["limits"], "a key keeps its expiry"
    row.get_by_role("button", name="Edit").click()
    edit.get_by_label("New expiry").select_option("in 7 days")
    assert sent(api, edit.get_by_role("button", name="Save")) == (
        "PUT",
        "/api/v1/keys/k1/expiry",
        {"ttl_seconds": 604800},
    )
    assert [path for _, path, _ in api.asked].count("/api/v1/keys/k1/name") == 0
    page.once("dialog", lambda dialog: dialog.accept())
    assert sent(api, row.get_by_role("button", name="Rotate")) == ("POST", "/api/v1/keys/k1/rotate", None)
    expect(keys.get_by_text("mp_k1_other")).to_be_visible()
    before = len(api.asked)
    page.once("dialog", lambda dialog: dialog.dismiss())
    row.get_by_role("button", name="Revoke").click()
    page.wait_for_timeout(200)
    assert len(api.asked) == before
    page.once("dialog", lambda dialog: dialog.accept())
    assert sent(api, row.get_by_role("button", name="Revoke")) == ("DELETE", "/api/v1/keys/k1", None)


def test_with_many_keys_the_form_and_a_new_secret_are_in_sight_and_a_secret_stays(page: Page, api: Answers):
    rows = [KEY | {"id": f"k{number}", "name": f"app-{number}", "expires": None} for number in range(60)]
    api.by_path |= {"GET /api/v1/keys": {"keys": rows}, "GET /api/v1/keys/usage": {"usage": []}}
    for number in (1, 59):
        api.by_path[f"POST /api/v1/keys/k{number}/rotate"] = {"id": f"k{number}", "key": f"mp_k{number}_other"}
    show(page, "keys")
    keys = page.get_by_role("region", name="API keys")
    keys.get_by_role("row").nth(1).get_by_role("button", name="Edit").click()
    name = page.get_by_role("region", name="Edit app-0").get_by_label("New name")
    expect(name).to_be_in_viewport()
    expect(name).to_be_focused()
    page.on("dialog", lambda dialog: dialog.dismiss() if dialog.message.startswith("Revoke") else dialog.accept())
    for number in (59, 1):
        keys.get_by_role("row").nth(number + 1).get_by_role("button", name="Rotate").click()
        expect(keys.get_by_text(f"mp_k{number}_other")).to_be_in_viewport()
    keys.get_by_role("row").nth(3).get_by_role("button", name="Revoke").click()
    expect(keys.get_by_text("mp_k59_other")).to_be_visible()
    expect(keys.get_by_text("mp_k1_other")).to_be_visible()


@pytest.mark.parametrize("begin", ["=", "+", "-", "@", "\t"])
def test_a_name_that_a_spreadsheet_would_run_is_text_in_the_csv_file(page: Page, api: Answers, begin: str):
    show(page)
    row = used("2026-01-01", name=begin + 'a,"b"')
    text = page.evaluate("async (row) => (await import('/ui/views/usage.js')).csv([row])", row)
    (found,) = csv.DictReader(io.StringIO(text))
    assert found["name"] == f"'{begin}" + 'a,"b"'
    assert found["completion_tokens"] == str(row["completion_tokens"])


def test_usage_is_summed_by_key_and_model_and_stacked_by_day(page: Page, api: Answers):
    days = [time.strftime("%Y-%m-%d", time.gmtime(time.time() - 86400 * ago)) for ago in (1, 0)]
    api.by_path |= {
        "GET /api/v1/keys": {"keys": []},
        "GET /api/v1/keys/usage": {
            "usage": [
                used(days[0]),
                used(days[1], completion_tokens=30),
                used(days[1], "k3", name="tool", prompt_tokens=90, cached_tokens=0, completion_tokens=1),
                used(
                    days[1],
                    "k2",
                    name="",
                    model="",
                    requests=1,
                    failed=0,
                    prompt_tokens=9,
                    cached_tokens=0,
                    completion_tokens=3,
                ),
            ]
        },
    }
    show(page, "keys")
    usage = page.get_by_role("region", name="Usage by day")
    rows = usage.get_by_role("row")
    expect(rows).to_have_count(4)
    assert [cells(row) for row in rows.all()[1:]] == [
        ["app", "qwen", "10", "2", "2,000", "800", "100"],
        ["tool", "qwen", "5", "1", "90", "0", "1"],
        ["k2 (ended)", "(no model)", "1", "0", "9", "0", "3"],
    ]
    expect(usage.locator("figcaption b")).to_have_text(f"{days[1]}: prompt 699, cached 400, generated 34")
    label = usage.get_by_role("img").get_attribute("aria-label") or ""
    assert label.endswith(f"{days[0]} 1,070, {days[1]} 1,133")
    usage.get_by_label("Key shown").select_option("k2")
    usage.get_by_label("Key shown").select_option("k2 (ended)")
    expect(rows).to_have_count(2)


def test_usage_is_not_added_up_again_with_each_change_of_the_pool(page: Page, api: Answers):
    """A year of 200 keys has 200,000 rows, and the live stream may change twice a second."""
    today = time.strftime("%Y-%m-%d", time.gmtime())
    rows = [used(today, f"k{number}", name=f"app-{number}") for number in range(200)]
    api.by_path |= {"GET /api/v1/keys": {"keys": []}, "GET /api/v1/keys/usage": {"usage": rows}}
    page.add_init_script(f"({OPEN_STREAM})()")
    show(page, "keys")
    expect(page.get_by_role("region", name="Usage by day").get_by_role("row")).to_have_count(201)
    page.evaluate(
        """(text) => {
        const set = Map.prototype.set;
        window.added = 0;
        Map.prototype.set = function (...given) { window.added += 1; return set.apply(this, given); };
        window.send(`event: status\\ndata: ${text}\\n\\n`);
    }""",
        json.dumps(status(cluster={"id": "c-1", "name": "renamed"})),
    )
    expect(page.get_by_role("heading", level=1)).to_contain_text("renamed")
    assert page.evaluate("window.added") < 100


def test_a_key_for_inference_shows_its_own_name_scopes_and_limits(page: Page, api: Answers):
    api.by_path |= {"GET /api/v1/key": KEY, "GET /api/v1/usage": {"usage": [used("2026-01-01")]}}
    show(page, "usage")
    text = " ".join(page.get_by_role("region", name="Your key").inner_text().split())
    assert "name app scopes infer expires" in text
    assert "limits models: qwen*; requests per minute: 10; concurrency: 2; priority: high" in text
    expect(page.get_by_role("navigation").get_by_role("link")).to_have_text(["Models", "Videos", "Chat", "Usage"])


def test_a_drain_that_is_not_over_leaves_the_other_buttons_and_a_lost_answer_is_a_sentence(page: Page):
    held = list[Route]()
    page.route("**/nodes/studio/drain", lambda route: held.append(route))
    page.route("**/nodes/studio/cordon", lambda route: route.abort())
    show(page)
    card = page.get_by_role("region", name="studio")
    with page.expect_request("**/nodes/studio/drain"):
        card.get_by_role("button", name="Drain").click()
    expect(card.get_by_role("button", name="Drain")).to_be_disabled()
    card.get_by_role("button", name="Cordon").click()
    expect(card.get_by_role("alert")).to_have_text("The coordinator does not answer")


LONG = "Maximilians_MacBookPro_im_Wohnzimmer_neben_der_Treppe_2023_M3Max"


def test_long_names_without_a_place_to_break_fit_on_a_phone(page: Page, api: Answers):
    api.sections |= {
        "status": status(cluster={"id": "c", "name": LONG}, warnings=[f"{LONG}: its gate is not armed"]),
        "nodes": [
            node(LONG, disk={"free": GIB, "total": 2 * GIB, "folder": "/"}),
            node(LONG + "2", NodeState.PAUSED, sharing=node()["sharing"] | {"why": LONG}),
        ],
        "models": [model("Größe_" * 30, place(LONG, "loaded"), place(LONG, "failed", cause=LONG))],
        "wishes": [wish("Größe_" * 30, missing=LONG, ready=[LONG])],
        "pulls": [pull(LONG, pull_node(LONG))],
        "requests": [],
        "ended": [ended("r1", node=LONG, key=LONG, model=LONG)],
        "joins": [{"name": LONG, "chip": LONG, "address": "10.0.0.9", "replaces": LONG}],
    }
    long_key = KEY | {"name": LONG + LONG[:36], "limits": {"models": ["Größe_" * 30]}}
    api.by_path |= {
        "GET /api/v1/keys": {"keys": [long_key]},
        "GET /api/v1/keys/usage": {"usage": [used(time.strftime("%Y-%m-%d", time.gmtime()), name=LONG, model=LONG)]},
        "GET /api/v1/tokens": {"tokens": []},
        "GET /v1/videos": {"data": []},
    }
    page.set_viewport_size({"width": 360, "height": 800})
    for view in ("pool", "models", "requests", "chat", "keys", "join"):
        show(page, view)
        if view == "keys":
            page.get_by_role("button", name="Edit").click()
        wider = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wider <= 0, f"{view} is {wider} wider than the screen"


def test_a_chat_offers_the_models_for_chats_that_a_mac_can_load(page: Page, api: Answers):
    api.sections["models"] = [
        model("bge", place("a", "known"), kind="embed"),
        model("broken", place("a", "failed"), kind="chat"),
        model("gone", place("a", "loaded", state="left"), kind="chat"),
        model("qwen", place("a", "known"), place("b", "failed"), kind="chat"),
        model("ranker", place("a", "loaded"), kind="rerank"),
    ]
    show(page, "chat")
    assert page.get_by_label("Model").get_by_role("option").all_inner_texts() == ["qwen"]


# joining, videos, settings, runbook


def test_joining_sends_the_token_the_code_and_the_decision(page: Page, api: Answers):
    api.by_path |= {
        "GET /api/v1/tokens": {"tokens": [{"id": "t1", "name": "lab", "uses_left": 3, "created": AT, "expires": AT}]},
        "POST /api/v1/tokens": {"join": "echo mpj1.x | cluster join macpool://h --token-file -", "qr": ["10", "01"]},
        "POST /api/v1/joins/123456": {"name": "air", "decision": "approved"},
        "DELETE /api/v1/joins/123456": {"name": "air", "decision": "rejected"},
    }
    api.sections["joins"] = [{"name": "air", "chip": "M2", "address": "10.0.0.9", "replaces": "studio"}]
    show(page, "join")
    expect(page.get_by_role("listitem")).to_contain_text("air M2, 10.0.0.9")
    expect(page.get_by_role("listitem")).to_contain_text("Replaces the member studio")
    row = page.get_by_role("region", name="Join tokens").get_by_role("row").nth(1)
    assert cells(row)[:3] == ["t1", "lab", "3"]
    make = page.get_by_role("button", name="Create a join command")
    assert sent(api, make) == ("POST", "/api/v1/tokens", {"ttl_seconds": 900, "uses": 1, "name": "page"})
    expect(page.get_by_text("echo mpj1.x | cluster join macpool://h --token-file -")).to_be_visible()
    squares = page.locator("svg.qr rect").all()
    assert [(one.get_attribute("x"), one.get_attribute("y")) for one in squares] == [("0", "0"), ("1", "1")]
    for button, method, decision in (("Approve", "POST", "approved"), ("Reject", "DELETE", "rejected")):
        page.get_by_label("Code on its screen").fill(" 123456 ")
        pressed = page.get_by_role("button", name=button, exact=True)
        assert sent(api, pressed) == (method, "/api/v1/joins/123456", None)
        expect(page.get_by_text(f"air: {decision}")).to_be_visible()
    page.once("dialog", lambda dialog: dialog.accept())
    assert sent(api, row.get_by_role("button", name="Revoke")) == ("DELETE", "/api/v1/tokens/t1", None)
    api.by_path["DELETE /api/v1/tokens/t1"] = "there is no token t1"
    page.once("dialog", lambda dialog: dialog.accept())
    row.get_by_role("button", name="Revoke").click()
    expect(page.get_by_role("alert")).to_have_text("there is no token t1")


def test_videos_show_state_progress_and_fault_and_are_cancelled_or_deleted(page: Page, api: Answers):
    job = {
        "model": "wan",
        "prompt": "a red fox",
        "size": "640x480",
        "seconds": "2",
        "created_at": AT,
        "phase": "",
        "progress": 0,
        "error": None,
    }
    api.by_path["GET /v1/videos"] = {
        "data": [
            job | {"id": "v1", "status": "in_progress", "progress": 42, "phase": "denoising"},
            job | {"id": "v2", "status": "failed", "error": {"message": "the Mac was lost"}},
            job | {"id": "v3", "status": "completed", "progress": 100},
            job | {"id": "v4", "status": "queued"},
        ]
    }
    show(page, "videos")
    cards = {name: page.get_by_role("region", name=name) for name in ("v1", "v2", "v3", "v4")}
    expect(cards["v1"].get_by_role("progressbar")).to_have_attribute("value", "42")
    for name, text in (("v1", ": denoising"), ("v1", "640x480, 2 s"), ("v2", "the Mac was lost"), ("v3", "completed")):
        expect(cards[name]).to_contain_text(text)
    buttons = {name: card.get_by_role("button").all_inner_texts() for name, card in cards.items()}
    assert buttons == {"v1": ["Cancel"], "v2": ["Delete"], "v3": ["Play", "Delete"], "v4": ["Cancel"]}
    assert sent(api, cards["v1"].get_by_role("button")) == ("POST", "/v1/videos/v1/cancel", None)
    assert sent(api, cards["v2"].get_by_role("button")) == ("DELETE", "/v1/videos/v2", None)
    with page.expect_request(f"{BASE}/v1/videos/v3/content"):
        cards["v3"].get_by_role("button", name="Play").click()
    expect(cards["v3"].locator("video")).to_have_attribute("src", re.compile("^blob:"))
    playing = cards["v3"].locator("video").get_attribute("src")
    api.by_path["GET /v1/videos"] = "the disk of the coordinator is full"
    expect(page.get_by_role("alert").filter(has_text="the disk of the coordinator is full")).to_be_visible()
    assert cards["v3"].locator("video").get_attribute("src") == playing, (
        "a failed reload keeps the list and its players"
    )


def test_a_list_that_arrives_later_than_the_next_reload_is_shown(page: Page, api: Answers):
    held = list[Route]()

    def count_held() -> int:
        """Return the number of requests that wait. Requests before this call have arrived: a later one is answered."""
        page.evaluate("() => fetch('/api/v1/key').then((answer) => answer.status)")
        return len(held)

    def wait_held(number: int) -> None:
        """Advance the clock of the page until this number of requests waits."""
        deadline = time.monotonic() + 15
        while count_held() != number and time.monotonic() < deadline:
            page.clock.run_for(1_000)
        assert len(held) == number

    page.route("**/v1/videos?*", lambda route: held.append(route))
    page.clock.install()
    page.goto(f"{BASE}/#/videos")
    wait_held(1)
    page.clock.run_for(20_000)
    assert count_held() == 1, "no further request before the answer"
    held.pop().fulfill(json={"data": []})
    expect(page.get_by_text("There are no video jobs.")).to_be_visible()
    wait_held(1)
    held.pop().fulfill(status=503, json={"error": {"message": "the disk is full"}})
    expect(page.get_by_role("alert")).to_have_text("the disk is full")
    wait_held(1)  # a failed reload is repeated


def test_settings_and_the_runbook_show_what_is_in_force(page: Page, api: Answers):
    api.by_path["GET /api/v1/settings"] = {
        "settings": [
            {"key": "router.queue_timeout_seconds", "value": 30, "origin": "--set", "description": "How long."},
        ]
    }
    show(page, "settings")
    text = " ".join(page.locator("main").inner_text().split())
    assert "version 1.2.3, protocol 7 endpoint http://host:8080/v1 cluster port macpool://host:8081 cluster c-1" in text
    row = page.get_by_role("region", name="Settings").get_by_role("row").nth(1)
    assert cells(row) == ["router.queue_timeout_seconds", "30", "--set", "How long."]
    api.sections["conditions"] = [
        {"name": "GuardOff", "severity": "critical", "node": "a", "summary": "the guard of a is off", "remedy": "on"},
    ]
    show(page, "runbook/GuardOff")
    page.reload()
    expect(page.get_by_role("heading", name="GuardOff")).to_be_visible()
    expect(page.get_by_text("the guard of a is off")).to_be_visible()
    show(page, "runbook/Cut%4Fff")
    expect(page.get_by_text("Not active.")).to_be_visible()
    show(page, "runbook/%")
    expect(page.get_by_role("link", name="CutOff")).to_be_visible()
