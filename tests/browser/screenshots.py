"""`python -m tests.browser.screenshots`: the screenshots of docs/page.md, of a pool of three nodes at work.

One node makes a video, one answers with a real model, one pretends to have a large model. One request was refused, and
one is running. A model is pulled from the test hub. Review the screenshots before committing them.
"""

import json
import random
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from openai import DefaultHttpxClient, OpenAI, OpenAIError
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.browser.chromium import CHROMIUM, FLAGS
from tests.browser.test_page import ask_for_a_video, go, visit
from tests.models import EMBEDDED
from tests.support.cluster.engine_pool import MLX
from tests.support.hub.hub import running_hub
from tests.support.processes import NO_TLS, Pool, environment, pool, until
from tests.support.video.studio import words
from wire.units import MIB

FOLDER = Path(__file__).parents[2] / "docs" / "images"
RAY_PORTS = 29000
BIG = (
    "engine.scripted.model=big-70b",
    "engine.scripted.memory=64GiB",
    "engine.scripted.weights=38GiB",
    "engine.scripted.kv_per_token=2097152",
    "engine.scripted.tokens=400",
    "engine.scripted.step_ms=60",
)
WIDE, DESKTOP, PHONE = {"width": 1120, "height": 700}, {"width": 1280, "height": 800}, {"width": 390, "height": 800}
VIEWS = ("Pool", "Requests", "Models", "Videos", "Chat", "Join", "Keys and usage", "Settings")
POINTS = 12
"""Points of the charts to wait for: two minutes."""
REPO, WEIGHTS, CHUNK_SECONDS = "lab/tiny-chat", 200 * MIB, 0.5
"""Repository of the hub, its weights in bytes, and the seconds for each 64 KiB: its pull runs until the end."""


@contextmanager
def at_work(folder: Path) -> Iterator[Pool]:
    """Run a pool with work for every view, and yield it.

    The pool has three nodes, a finished and a running video, an API key with limits, a wish, a pull, and requests.
    """
    with running_hub() as hub, pool(folder) as made:
        hub.add(REPO, _make_repository())
        made.up(
            "video.max_steps=1000",
            "cluster.name=home",
            "router.queue_timeout_seconds=1",
            f"hub.endpoint={hub.url}",
            "router.aliases.coder=big-120b,macpool-tiny",
        )
        filming = words(worker__ray_ports=RAY_PORTS, engine__scripted__model="big-120b", node__report_busy_seconds=0.2)
        serving = (*MLX, "models.use_huggingface_cache=true")
        for name, settings in (("studio", filming), ("mini", serving), ("macbook", BIG)):
            made.join(name, *settings, env=environment(HF_HOME=str(folder / f"{name}-cache")))
        first = ask_for_a_video(made)
        headers = {"authorization": f"Bearer {made.key}"}
        url = f"{made.base}/v1/videos/{first}"
        until(
            lambda: httpx.get(url, headers=headers, trust_env=False, verify=NO_TLS).json()["status"] == "completed",
            120,
            "a video",
        )
        made.cli("key", "create", "home-assistant", "--model", "macpool*", "--requests-per-minute", "60")
        made.cli("model", "want", "macpool-tiny", "--replicas", "2")
        hub.faults.chunk_seconds = CHUNK_SECONDS
        made.cli("pull", REPO, "--node", "mini", "--node", "macbook", "--detach")
        with _asked(made):
            ask_for_a_video(made, prompt="a paper boat on a quiet lake, morning light", steps=1000)
            yield made


def _make_repository() -> dict[str, bytes]:
    """Return the files of a tiny model, with large weights that are only pulled and never loaded."""
    tensor = {"dtype": "F32", "shape": [WEIGHTS // 4], "data_offsets": [0, WEIGHTS]}
    header = json.dumps({"model.embed_tokens.weight": tensor}).encode()
    weights = len(header).to_bytes(8, "little") + header + bytes(WEIGHTS)
    others = {file.name: file.read_bytes() for file in EMBEDDED.glob("*.json") if file.name != "answers.json"}
    return {**others, "model.safetensors": weights}


@contextmanager
def _asked(made: Pool) -> Iterator[None]:
    """Send requests that succeed, requests that are refused, and a long request that continues during the block."""
    direct = DefaultHttpxClient(trust_env=False, verify=NO_TLS, timeout=60)
    client = OpenAI(base_url=f"{made.base}/v1", api_key=made.key, max_retries=0, http_client=direct)

    def ask(model: str, text: str, name: str, tokens: int) -> None:
        said = [{"role": "user", "content": text}]
        try:
            for _ in client.chat.completions.create(
                model=model,
                messages=said,  # type: ignore[arg-type]
                max_tokens=tokens,
                stream=True,
                extra_headers={"x-request-id": name},
            ):
                pass
        except OpenAIError as error:
            print(f"{name}: {error}")

    def go_on() -> None:
        number = 0
        while not stop.wait(random.uniform(0.5, 3)):
            number += 1
            ask("macpool-tiny", "Hello again!", f"hello-{number}", random.randint(10, 60))

    ask("macpool-tiny", "Hello!", "greeting", 40)
    stop, asking = threading.Event(), threading.Thread(target=go_on, daemon=True)
    asking.start()
    until(lambda: made.get("/api/v1/history")["number"] >= POINTS, 300, "the charts")
    ask("big-70b", "word " * 9000, "whole-book", 2000)
    long = threading.Thread(target=ask, args=("big-70b", "Tell me a story", "story", 2000), daemon=True)
    long.start()
    yield
    stop.set()
    asking.join(60)
    direct.close()


def take(browser: Browser, made: Pool) -> None:
    """Take all screenshots: the large ones of the manual, and every view in both themes on a screen and a phone."""
    (FOLDER / "views").mkdir(parents=True, exist_ok=True)
    for theme, screen in (("light", WIDE), ("dark", PHONE)):
        context = browser.new_context(color_scheme=theme, viewport=screen)  # type: ignore[arg-type]
        page = _visit(context, made)
        _shoot(page, f"page-pool-{theme}")
        if theme == "light":
            _views(page)
        context.close()
    for theme in ("light", "dark"):
        for device, screen in (("desktop", DESKTOP), ("phone", PHONE)):
            context = browser.new_context(color_scheme=theme, viewport=screen, device_scale_factor=0.5)  # type: ignore[arg-type]
            page = _visit(context, made)
            for view in VIEWS:
                _open(page, view)
                _shoot(page, f"views/{view.split()[0].lower()}-{theme}-{device}")
            _own_usage(page, made)
            _shoot(page, f"views/usage-{theme}-{device}")
            context.close()


def _visit(context: BrowserContext, made: Pool) -> Page:
    page = visit(context, made)
    page.get_by_role("meter", name="Memory of studio").wait_for()
    page.get_by_role("img", name="Tokens per second").first.wait_for()
    return page


def _own_usage(page: Page, made: Pool) -> None:
    """Sign in with a program's key, and open its usage."""
    page.get_by_role("button", name="Sign out").click()
    page.get_by_label("Or enter an API key").fill(made.key)
    page.get_by_role("button", name="Sign in").click()
    go(page, "Usage")
    page.get_by_role("img", name="Tokens").wait_for()


def _views(page: Page) -> None:
    for view in VIEWS[1:]:
        _open(page, view)
        _shoot(page, f"page-{view.split()[0].lower()}", whole=view == "Models")
        if view == "Models":
            card = page.get_by_role("region", name="Pull a model")
            card.get_by_label("Repository").fill(REPO)
            card.get_by_role("button", name="Show the plan").click()
            card.get_by_role("region", name="Plan of the pull").wait_for()
            _shoot(page, "page-pull")
        if view == "Requests":
            page.get_by_label("Filter").fill("whole-book")
            page.get_by_role("link", name="whole-book").first.click()
            page.get_by_text("Decision").first.wait_for()
            _shoot(page, "page-explained")


def _open(page: Page, view: str) -> None:
    """Open a view and bring it to the state of its screenshot."""
    go(page, view)
    if view == "Videos":
        page.get_by_role("button", name="Play").click()
        expect(page.locator("video")).to_have_js_property("videoWidth", 64)
    elif view == "Chat":
        page.get_by_label("Model").select_option("macpool-tiny")
        page.get_by_label("Your message").fill("Hello!")
        page.get_by_role("button", name="Send").click()
        page.get_by_text("first token after").first.wait_for()
    elif view == "Join":
        page.get_by_role("button", name="Create a join command").click()
        page.get_by_role("img", name="QR").wait_for()
    elif view == "Keys and usage":
        page.get_by_role("img", name="Tokens").wait_for()
    elif view != "Pool":
        page.locator("main .card").first.wait_for()


def _shoot(page: Page, name: str, *, whole: bool = False) -> None:
    page.screenshot(path=FOLDER / f"{name}.png", full_page=whole)


@contextmanager
def _browser() -> Iterator[Browser]:
    with sync_playwright() as playing:
        yield playing.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))


def main() -> int:
    """Take the screenshots."""
    with tempfile.TemporaryDirectory(prefix="mp-") as folder, at_work(Path(folder)) as made, _browser() as browser:
        take(browser, made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
