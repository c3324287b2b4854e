"""Chat, keys, usage and requests of the page in a real browser, over a node that echoes its input."""

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import BrowserContext, Page, expect

from tests.browser.chromium import CHROMIUM
from tests.browser.test_page import go, link, sound
from tests.support.processes import NO_TLS, Pool, pool, until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")]
HOSTILE = (
    "<img src=x onerror=document.title='gone'>",
    "<script>document.title='gone'</script>",
    "[click](javascript:document.title='gone')",
    "[click](JaVaScRiPt:document.title='gone')",
    "[click](\x01javascript:document.title='gone')",
    "[click](data:text/html,<script>document.title='gone'</script>)",
    "[click](vbscript:x)",
    "[click](//elsewhere.example/x)",
    "[click](https://ok.example/\" onmouseover=\"document.title='gone')",
    "![x](https://elsewhere.example/track.png)",
    "![x](javascript:document.title='gone')",
    "```js\" onload=\"document.title='gone'\n</code></pre><img src=x onerror=document.title='gone'>\n```",
    "| <b>a</b> |\n|---|\n| <img src=x onerror=document.title='gone'> |",
    "# <svg onload=document.title='gone'>",
    "> - 1. <iframe src=javascript:document.title='gone'>",
    "https://ok.example/<img src=x onerror=document.title='gone'>",
    "**<details open ontoggle=document.title='gone'>**",
)
LONG = {
    "stars": "*" * 100_000,
    "openers": "*a **b __c ~~d " * 6_000,
    "brackets": "[" * 99_000 + "](javascript:1)",
    "links": "[a](" * 25_000,
    "ticks": "`a``b```c" * 11_000,
    "a heading of spaces": "# " + " " * 99_000 + "x",
    "a table of spaces": "|a\n-|-" + " " * 99_000 + "x",
    "a fence of spaces": "```" + " " * 99_000 + "`x",
    "a rule of spaces": "---" + " " * 99_000 + "x",
    "quotes": ">" * 100_000,
    "nested lists": "\n".join(" " * depth + "- x" for depth in range(440)),
    "cells": "|" * 300 + "\n|" + "-|" * 299 + "\n" + "|\n" * 49_000,
    "dots": "http://a" + "." * 99_000,
}
CUT_STREAM = """() => {
    const event = (data) => `data: ${JSON.stringify(data)}\\n\\n`;
    const chunk = (content) => event({ choices: [{ delta: { content }, finish_reason: null }] });
    const text = ["one ", "two ", "three ", "four"].map(chunk).join("");
    const usage = event({ choices: [], usage: { completion_tokens: 11 } }) + "data: [DONE]\\n\\n";
    const pieces = [...text.match(/[^]{1,29}/g).map((piece) => [1000, piece]), [2000, usage]];
    let now = 0;
    performance.now = () => now;
    const real = window.fetch;
    window.fetch = (path, options) => {
        if (path !== "/v1/chat/completions") return real(path, options);
        const pull = async (stream) => {
            await new Promise((then) => setTimeout(then, 20));
            const [at, piece] = pieces.shift() ?? [now, null];
            now = at;
            if (piece === null) stream.close();
            else stream.enqueue(new TextEncoder().encode(piece));
        };
        return Promise.resolve(new Response(new ReadableStream({ pull }), { headers: { "x-macpool-node": "studio" } }));
    };
}"""
RENDER = """async (text) => {
    const { markdown } = await import("/ui/markdown.js");
    const { html, render } = await import("/ui/vendor/preact.js");
    const began = performance.now();
    const place = document.createElement("div");
    render(html`<div class="answer">${markdown(text)}</div>`, place);
    document.body.append(place);
    const found = { html: place.innerHTML, text: place.textContent, seconds: (performance.now() - began) / 1000,
        tags: [...new Set([...place.querySelectorAll("*")].map((one) => one.localName))],
        links: [...place.querySelectorAll("a")].map((one) => one.getAttribute("href")) };
    await new Promise((then) => setTimeout(then, 50));
    place.remove();
    return found;
}"""
ALLOWED = {
    *("a", "blockquote", "button", "code", "del", "div", "em", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre"),
    *("span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul"),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with pool(tmp_path_factory.mktemp("chat")) as made:
        made.up()
        made.join("studio", "engine.scripted.text=echo", "engine.scripted.tokens=4000", "engine.scripted.step_ms=2")
        yield made


@pytest.fixture
def page(context: BrowserContext, home: Pool) -> Page:
    made = context.new_page()
    made.goto(link(home))
    expect(made.get_by_role("meter")).to_have_count(1)
    return made


def say(page: Page, text: str) -> None:
    page.get_by_label("Your message").fill(text)
    page.get_by_role("button", name="Send").click()


def asked(home: Pool, key: str, name: str, model: str = "scripted-1") -> int:
    body = {"model": model, "messages": [{"role": "user", "content": "one two"}], "max_tokens": 3}
    headers = {"authorization": f"Bearer {key}", "x-request-id": name}
    return httpx.post(
        f"{home.base}/v1/chat/completions", json=body, headers=headers, trust_env=False, verify=NO_TLS
    ).status_code


# Markdown


def test_markdown_is_shown_as_markdown(page: Page):
    text = "\n".join(
        (
            "# Title",
            "",
            "Some **bold**, *slanted*, ~~old~~ and `a < b` text, [a link](https://example.org/x).",
            "",
            "- one",
            "  - inner",
            "- two",
            "",
            "3. three",
            "",
            "> said",
            "",
            "| a | b |",
            "|---|:-:|",
            "| 1 | `2` |",
            "",
            "```python",
            "if a < b:",
            "    print(a)",
            "```",
        )
    )
    found = page.evaluate(RENDER, text)
    wanted = (
        "<h3>Title</h3>",
        "<strong>bold</strong>",
        "<em>slanted</em>",
        "<del>old</del>",
        "<code>a &lt; b</code>",
        "<ul><li>one<ul><li>inner</li></ul></li><li>two</li></ul>",
        '<ol start="3"><li>three</li></ol>',
        "<blockquote><p>said</p></blockquote>",
        "<td><code>2</code></td>",
        "<code>if a &lt; b:\n    print(a)</code>",
    )
    for part in wanted:
        assert part in found["html"], part
    assert found["links"] == ["https://example.org/x"]
    assert "snake_case_name 2 * 3 * 4" in page.evaluate(RENDER, "snake_case_name 2 * 3 * 4")["html"]


def test_hostile_markdown_is_text(page: Page):
    asked_for: list[str] = []
    page.on("request", lambda request: asked_for.append(request.url))
    for text in HOSTILE:
        found = page.evaluate(RENDER, text)
        assert set(found["tags"]) <= ALLOWED, text
        assert all(re.match("(https?|mailto):", address) for address in found["links"]), found["links"]
        assert " onerror=" not in re.sub(r">[^<]*<", "><", found["html"]), text
        assert page.title() != "gone", text
    assert [url for url in asked_for if "/ui/" not in url and "/api/" not in url] == []


def test_no_markdown_takes_long(page: Page):
    for name, text in LONG.items():
        tries = (page.evaluate(RENDER, text[:100_000])["seconds"] for _ in range(3))  # the machine may be busy
        assert any(seconds < 1 for seconds in tries), name


# chat


def test_an_answer_in_markdown_streams_and_hostile_parts_stay_text(page: Page):
    go(page, "Chat")
    say(page, "**bold** then\n```js\nlet a = 1;\n```\n<img src=x onerror=document.title='gone'> [x](javascript:1)")
    answer = page.locator(".answer").last
    expect(answer.locator("strong")).to_have_text("bold")
    expect(answer.locator("pre code")).to_have_text("let a = 1;")
    expect(answer.get_by_role("button", name="Copy code")).to_be_visible()
    expect(answer.locator("img, a")).to_have_count(0)
    assert page.title() != "gone"
    sound(page, "a chat")


def test_a_chat_outlives_a_view_and_a_reload_and_ends_with_signing_out(page: Page):
    go(page, "Chat")
    say(page, "remember me")
    expect(page.locator(".answer").last).to_have_text("remember me")
    go(page, "Pool")
    go(page, "Chat")
    expect(page.locator(".turn.user")).to_have_text("remember me")
    page.reload()
    expect(page.locator(".turn.user")).to_have_text("remember me")
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".turn")).to_have_count(0)
    say(page, "second chat")
    expect(page.locator(".answer").last).to_have_text("second chat")
    page.get_by_label("History").select_option("remember me")
    expect(page.locator(".turn.user")).to_have_text("remember me")
    page.get_by_role("button", name="Delete").click()
    expect(page.locator(".turn.user")).to_have_text("second chat")
    assert page.evaluate("localStorage.getItem('macpool-chats')") is None
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("heading", name="Sign in to Macpool")).to_be_visible()
    assert page.evaluate("sessionStorage.getItem('macpool-chats')") is None


def test_the_twenty_first_chat_replaces_the_oldest_one_without_an_answer_in_progress(page: Page):
    go(page, "Chat")
    say(page, "streams " * 3000)
    expect(page.locator(".answer").last).to_contain_text("streams streams")
    page.evaluate("""async () => {
        const chats = await import("/ui/chats.js");
        for (let count = 0; count < 25; count++) {
            chats.begin({ model: "", system: "", temperature: "", top_p: "", max_tokens: "" });
            const { current } = JSON.parse(sessionStorage.getItem("macpool-chats"));
            chats.set(current, { turns: [{ role: "user", text: `question ${count}` }] });
        }
    }""")
    stored = page.evaluate("JSON.parse(sessionStorage.getItem('macpool-chats')).chats.map((one) => one.turns[0].text)")
    assert stored[:-1] == [f"question {count}" for count in range(24, 5, -1)]
    assert stored[-1].startswith("streams")
    page.get_by_label("History").select_option(index=19)
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("button", name="Stop")).to_have_count(0)


@pytest.mark.parametrize("signs_out", [True, False], ids=["signed out", "key refused"])
def test_an_answer_ends_with_the_key_of_the_page_and_leaves_no_chat(page: Page, home: Pool, signs_out: bool):
    go(page, "Chat")
    say(page, "secret " * 3000)
    expect(page.locator(".answer").last).to_contain_text("secret secret")
    if signs_out:
        page.get_by_role("button", name="Sign out").click()
    else:
        page.evaluate("""async () => {
            localStorage.setItem("macpool-key", "mp_wrong_key");
            await (await import("/ui/shared.js")).call("GET", "/api/v1/status").catch(() => null);
        }""")
    expect(page.get_by_role("heading", name="Sign in to Macpool")).to_be_visible()
    until(lambda: not home.get("/api/v1/status")["in_flight"])
    assert home.get("/api/v1/requests?last=1")["requests"][0]["outcome"] == "cancelled"
    assert page.evaluate("sessionStorage.getItem('macpool-chats')") is None
    page.goto("about:blank")
    page.goto(link(home))
    expect(page.get_by_role("meter")).to_have_count(1)
    go(page, "Chat")
    expect(page.locator(".turn")).to_have_count(0)


def test_signing_out_in_one_tab_signs_out_the_other_tab_and_ends_its_chats(page: Page, home: Pool):
    other = page.context.new_page()
    other.goto(page.url)
    go(other, "Chat")
    say(other, "secret " * 3000)
    expect(other.locator(".answer").last).to_contain_text("secret secret")
    page.get_by_role("button", name="Sign out").click()
    expect(other.get_by_role("heading", name="Sign in to Macpool")).to_be_visible()
    until(lambda: not home.get("/api/v1/status")["in_flight"])
    assert other.evaluate("sessionStorage.getItem('macpool-chats')") is None
    page.goto("about:blank")
    page.goto(link(home))
    expect(other.get_by_role("button", name="Sign out")).to_be_visible()
    expect(other.get_by_label("Message")).to_be_visible()
    expect(other.locator(".turn")).to_have_count(0)


def test_a_late_refusal_of_a_former_key_does_not_sign_out_the_present_one(page: Page):
    refused = page.evaluate("""async () => {
        const { call } = await import("/ui/shared.js");
        const own = localStorage.getItem("macpool-key");
        localStorage.setItem("macpool-key", "mp_wrong_key");
        const late = call("GET", "/api/v1/status").catch((wrong) => wrong.status);
        localStorage.setItem("macpool-key", own);
        return late;
    }""")
    assert refused == 401
    assert page.evaluate("localStorage.getItem('macpool-key')") is not None
    expect(page.get_by_role("button", name="Sign out")).to_be_visible()


def test_a_tab_that_was_asleep_while_another_person_signed_in_shows_no_chat_of_the_former_one(page: Page, home: Pool):
    go(page, "Chat")
    say(page, "remember me")
    expect(page.locator(".answer").last).to_have_text("remember me")
    kept = page.evaluate("sessionStorage.getItem('macpool-chats')")
    page.get_by_role("button", name="Sign out").click()
    page.goto("about:blank")
    page.goto(link(home))
    expect(page.get_by_role("meter")).to_have_count(1)
    page.evaluate("chats => sessionStorage.setItem('macpool-chats', chats)", kept)
    page.reload()
    go(page, "Chat")
    expect(page.locator(".turn")).to_have_count(0)


def test_system_prompt_and_parameters_are_sent(page: Page):
    go(page, "Chat")
    page.get_by_text("System prompt and parameters").click()
    page.get_by_label("System prompt", exact=True).fill("Be brief.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Max tokens").fill("2")
    with page.expect_request("**/v1/chat/completions") as sent:
        say(page, "one two three four five")
    body = sent.value.post_data_json
    assert body is not None
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one two three four five"},
    ]
    assert (body["temperature"], body["max_tokens"]) == (0.5, 2)
    assert "top_p" not in body
    expect(page.get_by_text("ended at max tokens")).to_be_visible()


def test_a_message_is_sent_with_the_turns_before_it(page: Page):
    go(page, "Chat")
    say(page, "first words")
    expect(page.locator(".answer").last).to_have_text("first words")
    expect(page.get_by_role("button", name="Stop")).to_have_count(0)
    with page.expect_request("**/v1/chat/completions") as sent:
        say(page, "and more")
    body = sent.value.post_data_json
    assert body is not None
    assert [(message["role"], message["content"]) for message in body["messages"]] == [
        ("user", "first words"),
        ("assistant", "first words"),
        ("user", "and more"),
    ]


def test_a_message_without_an_answer_is_sent_in_one_with_the_next(page: Page):
    """Chat templates such as that of Gemma refuse two messages of the user in a row."""
    go(page, "Chat")
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=503, json={"error": {"message": "full"}}))
    say(page, "first words")
    expect(page.get_by_role("alert")).to_have_text("full")
    page.unroute("**/v1/chat/completions")
    with page.expect_request("**/v1/chat/completions") as sent:
        say(page, "and more")
    body = sent.value.post_data_json
    assert body is not None
    assert body["messages"] == [{"role": "user", "content": "first words\n\nand more"}]
    expect(page.locator(".turn.user")).to_have_count(2)


def test_enter_sends_a_message_and_shift_with_enter_begins_a_line(page: Page):
    go(page, "Chat")
    message = page.get_by_label("Your message")
    message.fill("one")
    message.press("Shift+Enter")
    message.press_sequentially("two")
    with page.expect_request("**/v1/chat/completions") as sent:
        message.press("Enter")
    body = sent.value.post_data_json
    assert body is not None
    assert [message["content"] for message in body["messages"]] == ["one\ntwo"]


def test_a_stream_may_be_cut_anywhere_and_its_speed_is_that_of_the_decode(page: Page):
    """The clock of the page is set to 1 s before every token, and to 2 s before the usage of 11 tokens."""
    go(page, "Chat")
    page.evaluate(CUT_STREAM)
    say(page, "count")
    expect(page.locator(".answer").last).to_have_text("one two three four")
    expect(page.get_by_text(re.compile("on studio, first token after 1.00 s, 11 tokens, 10 tokens/s$"))).to_be_visible()


def test_an_answer_is_stopped_and_what_came_stays(page: Page, home: Pool):
    go(page, "Chat")
    say(page, "word " * 3000)
    expect(page.locator(".answer").last).to_contain_text("word word")
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_text(re.compile("stopped$"))).to_be_visible()
    expect(page.locator(".answer").last).to_contain_text("word word")
    expect(page.get_by_role("button", name="Stop")).to_have_count(0)


def test_an_answer_is_copied(context: BrowserContext, page: Page):
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    go(page, "Chat")
    say(page, "copy **this**")
    expect(page.locator(".answer strong")).to_have_text("this")
    page.get_by_role("button", name="Copy", exact=True).click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == "copy **this**"


# requests


def test_requests_have_time_mac_and_speed_and_are_filtered_refusals_too(page: Page, home: Pool):
    assert asked(home, home.key, "good-1") == 200
    assert asked(home, home.key, "lost-1", "no-such-model") == 404
    go(page, "Requests")
    row = page.get_by_role("row").filter(has_text="good-1")
    expect(row).to_contain_text(re.compile(r"\d+:\d\d:\d\d"))
    expect(row).to_contain_text("studio")
    expect(row).to_contain_text(re.compile(r"\d\.\d\d s"))
    page.get_by_label("Outcome").select_option("refused")
    expect(page.get_by_role("row").filter(has_text="good-1")).to_have_count(0)
    expect(page.get_by_role("row").filter(has_text="lost-1")).to_contain_text("model_not_found")
    page.get_by_label("Outcome").select_option("all")
    page.get_by_label("Filter").fill("GOOD-")
    expect(page.get_by_role("row").filter(has_text="lost-1")).to_have_count(0)
    expect(row).to_be_visible()
    page.get_by_label("Filter").fill("")
    page.get_by_role("button", name="Load the newest 1,000").click()
    expect(row).to_have_count(1)


# keys and usage


def test_a_key_gets_limits_a_name_an_expiry_and_a_new_secret(page: Page, home: Pool):
    page.on("dialog", lambda dialog: dialog.accept())
    go(page, "Keys and usage")
    page.get_by_label("Name", exact=True).fill("garage")
    page.get_by_label("Expires").select_option("in 30 days")
    page.get_by_text("Models and limits").click()
    page.get_by_label("Models", exact=True).fill("scripted*, other")
    page.get_by_label("Requests per minute").fill("7")
    page.get_by_role("button", name="Create", exact=True).click()
    first = page.get_by_text(re.compile(r"^mp_[a-z2-7]+_")).text_content() or ""
    row = page.get_by_role("region", name="API keys").get_by_role("row").filter(has_text="garage")
    expect(row).to_contain_text("models: scripted*, other; requests per minute: 7")
    row.get_by_role("button", name="Edit").click()
    edit = page.get_by_role("region", name="Edit garage")
    edit.get_by_label("New name").fill("workshop")
    edit.get_by_label("Concurrent requests").fill("2")
    edit.get_by_label("New expiry").select_option("never")
    edit.get_by_role("button", name="Save").click()
    row = page.get_by_role("region", name="API keys").get_by_role("row").filter(has_text="workshop")
    expect(row).to_contain_text("requests per minute: 7; concurrency: 2")
    (listed,) = [key for key in home.cli("key", "list")["keys"] if key["name"] == "workshop"]
    assert listed["expires"] is None
    assert asked(home, first, "k-1") == 200
    row.get_by_role("button", name="Rotate").click()
    status = page.get_by_role("region", name="API keys").get_by_role("status")
    second = status.get_by_text(re.compile(r"^mp_[a-z2-7]+_")).text_content() or ""
    assert first != second
    assert (asked(home, first, "k-2"), asked(home, second, "k-3")) == (401, 200)
    sound(page, "keys with usage")


def test_usage_is_drawn_by_day_and_downloaded_as_csv(page: Page, home: Pool):
    key = home.create_key("=HYPERLINK(1)")
    assert asked(home, key, "u-1") == 200
    go(page, "Keys and usage")
    usage = page.get_by_role("region", name="Usage by day")
    expect(usage.get_by_role("img", name=re.compile(r"^Tokens: \d{4}-\d\d-\d\d"))).to_be_visible()
    with page.expect_download() as got:
        usage.get_by_role("button", name="Download CSV").click()
    rows = list(csv.DictReader(io.StringIO(Path(got.value.path()).read_text())))
    (row,) = [row for row in rows if "HYPERLINK" in row["name"]]
    assert row["name"] == "'=HYPERLINK(1)", "a spreadsheet would run it"
    assert (row["model"], row["requests"], row["completion_tokens"]) == ("scripted-1", "1", "2")


# joining


def test_an_approval_that_replaces_a_member_is_marked(page: Page, home: Pool):
    home.join("garage").kill()
    until(lambda: home.node("garage")["state"] == "lost", what="garage is lost")
    newcomer = home.join("garage-2", "node.machine=garage", wait=False, token=False)
    go(page, "Join")
    expect(page.get_by_text("approving the request ends the current certificate of garage")).to_be_visible(
        timeout=30_000
    )
    newcomer.close()
