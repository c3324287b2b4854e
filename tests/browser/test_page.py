"""The page in a real browser, over a real coordinator and its nodes."""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from openai import DefaultHttpxClient, OpenAI
from playwright.sync_api import Browser, BrowserContext, Page, expect

from tests.browser.chromium import CHROMIUM
from tests.effort import IS_NIGHTLY, SEED
from tests.support.cluster.engine_pool import order
from tests.support.processes import NO_TLS, Pool, get_ray_ports, pool, until
from tests.support.video.chain import until_ray
from tests.support.video.studio import words

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")]
VIEWS = ("Pool", "Requests", "Models", "Videos", "Chat", "Join", "Keys and usage", "Settings")
RAY_PORTS = get_ray_ports(4)
"""A port range of this worker, because Ray needs a range of ports."""
CLIP = {"model": "tiny-wan", "prompt": "a red fox", "size": "64x48", "frames": 9, "fps": 8, "steps": 4, "seed": 1}
HOSTILE = "<img src=x onerror=document.title='gone'>"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with pool(tmp_path_factory.mktemp("page")) as made:
        made.up()
        for name in ("studio", "mini", "laptop"):
            made.join(name)
        client = OpenAI(
            base_url=f"{made.base}/v1", api_key=made.key, http_client=DefaultHttpxClient(trust_env=False, verify=NO_TLS)
        )
        client.chat.completions.create(
            model="scripted-1",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=4,
            extra_headers={"x-request-id": "told-1"},
        )
        made.create_key(HOSTILE)
        yield made


def link(home: Pool) -> str:
    """Return a link as that of `cluster open`, made by the API."""
    return home.post("/api/v1/page/links")["url"]


def visit(context: BrowserContext, home: Pool, macs: int = 3) -> Page:
    page = context.new_page()
    page.goto(link(home))
    expect(page.get_by_role("meter")).to_have_count(macs)
    return page


def go(page: Page, view: str) -> None:
    page.get_by_role("navigation").get_by_role("link", name=view, exact=True).click()
    expect(page.get_by_role("heading", level=2)).to_have_text(view)


def test_a_link_opens_the_page_once(context: BrowserContext, home: Pool):
    url, page = home.cli("open", "--print")["url"], context.new_page()
    page.goto(url)
    expect(page.get_by_role("heading", name="Pool", exact=True)).to_be_visible()
    assert "#in=" not in page.url
    other = context.browser.new_context().new_page()  # type: ignore[union-attr]
    other.goto(url)
    expect(other.get_by_role("alert")).to_contain_text("this link was used")
    other.context.close()


def sign_in(page: Page, home: Pool, key: str) -> None:
    page.goto(home.base)
    page.get_by_label("Or enter an API key").fill(key)
    page.get_by_role("button", name="Sign in").click()


def views_of(page: Page) -> list[str]:
    expect(page.get_by_role("navigation")).to_be_visible()
    return page.get_by_role("navigation").get_by_role("link").all_text_contents()


def test_a_wrong_key_opens_nothing(context: BrowserContext, home: Pool):
    page = context.new_page()
    sign_in(page, home, "mp_wrong_key")
    expect(page.get_by_role("alert")).to_be_visible()
    expect(page.get_by_role("navigation")).to_have_count(0)


def test_a_key_for_inference_gets_chat_models_and_its_own_usage(context: BrowserContext, home: Pool):
    page, wrong = context.new_page(), list[str]()
    page.on("response", lambda answer: wrong.append(answer.url) if answer.status == 403 else None)
    sign_in(page, home, home.key)
    expect(page.get_by_role("heading", level=2)).to_have_text("Chat")
    assert views_of(page) == ["Models", "Videos", "Chat", "Usage"]
    page.get_by_label("Your message").fill("Hello")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_text("lorem ipsum")).to_be_visible()
    go(page, "Models")
    expect(page.get_by_role("region", name="scripted-1").get_by_text("loaded").first).to_be_visible()
    expect(page.get_by_role("button", name="Unload")).to_have_count(0)
    go(page, "Usage")
    expect(page.get_by_role("region", name="Your key").get_by_text("first")).to_be_visible()
    expect(
        page.get_by_role("region", name="Usage by day").get_by_role("row").filter(has_text="scripted-1")
    ).to_be_visible()
    page.goto(f"{home.base}/#/keys")
    expect(page.get_by_role("heading", level=2)).to_have_text("Chat")
    assert wrong == [], "the page asks for what the key may not see"


def test_a_key_for_metrics_looks_and_changes_nothing(context: BrowserContext, home: Pool):
    page = context.new_page()
    sign_in(page, home, home.create_key("grafana", "metrics"))
    assert views_of(page) == ["Pool", "Requests", "Models"]
    expect(page.get_by_role("meter")).to_have_count(3)
    expect(page.get_by_role("button", name="Cordon")).to_have_count(0)
    go(page, "Models")
    expect(page.get_by_role("region", name="scripted-1")).to_be_visible()
    expect(page.get_by_role("button", name="Unload")).to_have_count(0)


def test_signing_out_ends_the_key(context: BrowserContext, home: Pool):
    page = visit(context, home)
    key = page.evaluate("localStorage.getItem('macpool-key')")
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=home.base, trust_env=False, verify=NO_TLS, headers=headers) as client:
        assert client.get("/api/v1/status").status_code == 200
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_role("heading", name="Sign in to Macpool")).to_be_visible()
        until(lambda: client.get("/api/v1/status").status_code == 401, what="the key's end")
    assert page.evaluate("localStorage.getItem('macpool-key')") is None


def test_a_memory_bar_has_a_text_for_screen_readers(context: BrowserContext, home: Pool):
    page = visit(context, home)
    bar = page.get_by_role("meter", name="Memory of studio")
    assert re.search(
        r"in use [\d.]+ GiB, reserved .*margin .*leased to video .*of a cap of",
        bar.get_attribute("aria-valuetext") or "",
    )
    expect(page.get_by_text("gate armed")).to_have_count(3)


def test_a_change_in_the_pool_is_seen_without_asking(context: BrowserContext, home: Pool):
    page = visit(context, home)
    card = page.get_by_role("region", name="mini")
    order(home, "/api/v1/nodes/mini/cordon")
    expect(card.get_by_text("ready, cordoned")).to_be_visible()
    card.get_by_role("button", name="Uncordon").click()
    expect(card.get_by_text("ready", exact=True)).to_be_visible()
    assert home.node("mini")["cordoned"] is False


def test_a_mac_is_paused_without_alarm_and_without_numbers_and_resumed(context: BrowserContext, home: Pool):
    page = visit(context, home)
    card = page.get_by_role("region", name="laptop")
    expect(page.get_by_text("All healthy")).to_be_visible()
    card.get_by_label("How long laptop is paused").select_option("1 hour")
    card.get_by_role("button", name="Pause").click()
    expect(card.get_by_text(re.compile("paused by an administrator of the pool, until"))).to_be_visible()
    found = home.node("laptop")
    assert found["state"] == "paused"
    assert 3400 < found["sharing"]["until"] - time.time() <= 3600
    expect(card.get_by_role("meter")).to_have_count(0)
    for badge in ("gate armed", "gate not armed"):
        expect(card.get_by_text(badge)).to_have_count(0)
    expect(page.get_by_text("All healthy")).to_be_visible()
    expect(page.get_by_text("2 of 3 Macs ready, 1 paused")).to_be_visible()
    card.get_by_role("button", name="Resume").click()
    expect(card.get_by_role("button", name="Pause")).to_be_visible()
    until(lambda: home.serves("laptop"), what="laptop takes work again")
    card.get_by_label("How long laptop is paused").select_option("until resumed")
    card.get_by_role("button", name="Pause").click()
    expect(
        card.get_by_text("paused by an administrator of the pool. Its memory is free for its owner.")
    ).to_be_visible()
    assert home.node("laptop")["sharing"]["until"] is None
    card.get_by_role("button", name="Resume").click()
    until(lambda: home.serves("laptop"), what="laptop takes work again")
    expect(card.get_by_text("gate armed")).to_be_visible()


def test_whether_a_mac_may_make_videos_is_shown_and_changed(context: BrowserContext, home: Pool):
    page = visit(context, home)
    card = page.get_by_role("region", name="mini")
    expect(card.get_by_text("not allowed")).to_be_visible()
    card.get_by_role("button", name="Allow video").click()
    expect(card.get_by_text(re.compile("^allowed, "))).to_be_visible()
    assert home.node("mini")["video"]["allowed"] is True
    card.get_by_role("button", name="Deny video").click()
    expect(card.get_by_text("not allowed")).to_be_visible()


def test_the_load_of_the_last_hour_is_drawn_in_total_and_for_each_mac(context: BrowserContext, home: Pool):
    page = visit(context, home)
    total = page.get_by_role("region", name="The pool in the last hour")
    for title in ("Tokens per second", "Requests", "Memory", "Time to first token"):
        expect(total.get_by_role("img", name=title)).to_be_visible()
        if title != "Requests":
            expect(page.get_by_role("region", name="mini").get_by_role("img", name=title)).to_be_visible()
    expect(total.get_by_role("img", name="Memory")).to_have_attribute("aria-label", re.compile(r"now [\d.]+ GiB"))
    assert total.get_by_role("img", name="Memory").locator("path.current").get_attribute("d")


def test_a_request_is_explained(context: BrowserContext, home: Pool):
    page = visit(context, home)
    go(page, "Requests")
    page.get_by_role("link", name="told-1").click()
    expect(page.get_by_role("heading", name="told-1")).to_be_visible()
    decided = page.get_by_role("region", name="Macs").get_by_role("row").filter(has_text="chosen")
    expect(decided).to_contain_text(re.compile(r"\d\.\d\d s"))
    expect(page.get_by_text(re.compile(r"4 prompt|prompt, 0 of them cached, 4 generated"))).to_be_visible()
    expect(page.get_by_role("region", name="Steps").get_by_text("first token")).to_be_visible()


def test_a_chat_streams_and_names_the_node_that_answers(context: BrowserContext, home: Pool):
    page = visit(context, home)
    go(page, "Chat")
    page.get_by_label("Your message").fill("Hello")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_text("lorem ipsum")).to_be_visible()
    expect(page.get_by_text(re.compile(r"on (studio|mini|laptop), first token after .* tokens/s"))).to_be_visible()


def test_the_page_shows_a_join_command_and_refuses_a_wrong_code(context: BrowserContext, home: Pool):
    page = visit(context, home)
    go(page, "Join")
    page.get_by_role("button", name="Create a join command").click()
    expect(page.get_by_text(re.compile(r"^echo mpj1\..* \| cluster join macpool://.* --token-file -"))).to_be_visible()
    expect(page.get_by_role("img", name="QR")).to_be_visible()
    page.get_by_label("Code on its screen").fill("000000")
    page.get_by_role("button", name="Approve").click()
    expect(page.get_by_role("alert")).to_contain_text("no waiting machine shows this code")


def test_a_key_is_made_shown_once_and_revoked(context: BrowserContext, home: Pool):
    page = visit(context, home)
    go(page, "Keys and usage")
    page.get_by_label("Name", exact=True).fill("kitchen")
    page.get_by_role("button", name="Create").click()
    expect(page.get_by_text(re.compile(r"^mp_[a-z2-7]+_"))).to_be_visible()
    row = page.get_by_role("row").filter(has_text="kitchen")
    page.on("dialog", lambda dialog: dialog.accept())
    row.get_by_role("button", name="Revoke").click()
    expect(row).to_have_count(0)
    assert "kitchen" not in [key["name"] for key in home.cli("key", "list")["keys"]]


def test_a_model_is_unloaded_or_the_refusal_is_shown(context: BrowserContext, home: Pool):
    page = visit(context, home)
    go(page, "Models")
    page.get_by_role("region", name="scripted-1").get_by_role("button", name="Unload").first.click()
    expect(page.get_by_role("alert").first).to_contain_text("scripted")


def test_names_are_text_and_nothing_comes_from_elsewhere(context: BrowserContext, home: Pool):
    page = context.new_page()
    asked: list[str] = []
    wrong: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.goto(link(home))
    expect(page.get_by_role("meter")).to_have_count(3)
    for view in VIEWS:
        go(page, view)
    go(page, "Keys and usage")
    expect(page.get_by_role("region", name="API keys").get_by_text(HOSTILE).first).to_be_visible()
    assert page.title() != "gone"
    assert len(asked) > 12
    assert {url for url in asked if not url.startswith(home.base + "/")} == set()
    assert wrong == []


WIDTHS = (360, 1200)


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_every_view_is_accessible_in_light_and_dark_on_a_phone_and_a_screen(browser: Browser, home: Pool, colours: str):
    """In CI one scheme is shown on a phone and the other one on a screen, the other way round the next day."""
    for width in WIDTHS if IS_NIGHTLY else (WIDTHS[(SEED + (colours == "dark")) % 2],):
        context = browser.new_context(color_scheme=colours, viewport={"width": width, "height": 800})  # type: ignore[arg-type]
        page = visit(context, home)
        for view in VIEWS:
            go(page, view)
            sound(page, f"{view} at {width} pixels")
        context.close()


def sound(page: Page, what: str) -> None:
    """Check that the page is accessible and no wider than the screen."""
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    wider = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wider <= 0, f"{what} is {wider} wider than the screen"


@pytest.fixture
def film(tmp_path: Path) -> Iterator[Pool]:
    """Start a pool with a node that makes videos."""
    with pool(tmp_path) as made:
        made.up("video.max_steps=1000")
        made.join("studio", *words(worker__ray_ports=RAY_PORTS, node__report_busy_seconds=0.2))
        yield made


def ask_for_a_video(film: Pool, **changes: object) -> str:
    until_ray(film, "studio")
    headers = {"authorization": f"Bearer {film.key}"}
    url = f"{film.base}/v1/videos"
    return (
        httpx.post(url, json=CLIP | changes, headers=headers, trust_env=False, verify=NO_TLS, timeout=30)
        .raise_for_status()
        .json()["id"]
    )


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_video_is_followed_played_and_deleted_and_another_cancelled(context: BrowserContext, film: Pool):
    """CI has these tests:

    - `tests/browser/test_views.py::test_videos_show_state_progress_and_fault_and_are_cancelled_or_deleted`
    - `tests/e2e/video/test_videos.py::test_a_job_from_the_library_to_a_file_that_plays`
    """
    made = ask_for_a_video(film)
    page = visit(context, film, macs=1)
    go(page, "Videos")
    card = page.get_by_role("region", name=made)
    expect(card.get_by_text("completed", exact=True)).to_be_visible(timeout=90_000)
    card.get_by_role("button", name="Play").click()
    expect(card.locator("video")).to_have_js_property("videoWidth", 64)
    expect(card.locator("video")).to_have_js_property("duration", 1.125)
    other = ask_for_a_video(film, steps=1000)
    running = page.get_by_role("region", name=other)
    expect(running.get_by_role("progressbar")).to_be_visible()
    expect(running.get_by_text("denoising")).to_be_visible(timeout=90_000)
    sound(page, "a video that is made")
    go(page, "Pool")
    expect(page.get_by_role("meter", name="Memory of studio")).to_have_attribute(
        "aria-valuetext", re.compile("leased to video 36.0 GiB")
    )
    go(page, "Videos")
    running.get_by_role("button", name="Cancel").click()
    expect(running.get_by_text("it was cancelled")).to_be_visible()
    for one in (card, running):
        one.get_by_role("button", name="Delete").click()
        expect(one).to_have_count(0)


def test_the_keyboard_is_enough(context: BrowserContext, home: Pool):
    page = visit(context, home)
    for _ in range(3):
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Models"
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=2)).to_have_text("Models")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"


def test_the_theme_is_remembered(context: BrowserContext, home: Pool):
    page = visit(context, home)
    page.get_by_label("Theme").select_option("dark")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.get_by_label("Theme").select_option("light")
    expect(page.locator("html")).to_have_attribute("data-theme", "light")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark
    page.reload()
    expect(page.get_by_label("Theme")).to_have_value("light")


def test_the_page_reports_a_lost_coordinator_and_reconnects(browser: Browser, tmp_path: Path):
    with pool(tmp_path) as made:
        facts = made.up()
        made.join("studio")
        context = browser.new_context()
        page = context.new_page()
        page.goto(link(made))
        expect(page.get_by_role("meter")).to_have_count(1)
        expect(page.get_by_text("All healthy")).to_be_visible()
        assert made.coordinator is not None
        made.coordinator.stop()
        expect(page.get_by_text("The coordinator does not answer")).to_be_visible()
        made.up(listen=facts["base_url"].removeprefix("http://").removesuffix("/v1"))
        expect(page.get_by_role("heading", name="Sign in to Macpool")).to_be_visible()  # its keys exist in memory only
        context.close()


def test_a_lost_mac_is_shown_as_lost_without_old_numbers(browser: Browser, tmp_path: Path):
    with pool(tmp_path) as made:
        made.up()
        made.join("studio")
        page = browser.new_context().new_page()
        page.goto(link(made))
        expect(page.get_by_text("All healthy")).to_be_visible()
        made.nodes["studio"].kill()
        card = page.get_by_role("region", name="studio")
        expect(card.get_by_text("lost", exact=True)).to_be_visible(timeout=30_000)
        expect(card.get_by_text(re.compile("Lost, last report"))).to_be_visible()
        expect(page.get_by_role("meter")).to_have_count(0)
        expect(card.get_by_text("gate armed")).to_have_count(0)
        expect(page.get_by_text("All healthy")).to_have_count(0)
        expect(page.get_by_text("No Mac is ready")).to_be_visible()
        go(page, "Models")
        expect(page.get_by_role("region", name="scripted-1").get_by_text("lost")).to_be_visible()
        expect(page.get_by_role("button", name="Unload")).to_have_count(0)
        page.on("dialog", lambda dialog: dialog.accept())
        go(page, "Pool")
        card.get_by_role("button", name="Remove").click()
        expect(card).to_have_count(0)
        page.context.close()
