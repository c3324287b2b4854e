"""The models view in a real browser: a model is pulled from the test hub onto two nodes, loaded, unloaded, deleted."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Dialog, Locator, Page, expect

from tests.browser.chromium import CHROMIUM
from tests.browser.test_page import go, link, sound
from tests.models import EMBEDDED
from tests.support.cluster.engine_pool import MLX
from tests.support.hub.hub import Answer, Hub, running_hub
from tests.support.processes import Pool, environment, pool, until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")]
REPO, NODES = "lab/tiny", ("studio", "mini")
FILES = {file.name: file.read_bytes() for file in EMBEDDED.iterdir() if file.name != "answers.json"}
SLOW_CHUNK_SECONDS = 0.3
"""Seconds for 64 KiB of a file, while a test looks at a running pull."""


@dataclass(frozen=True)
class Lab:
    """A pool of two nodes with MLX engines and empty caches, and the hub of its pulls."""

    pool: Pool
    hub: Hub


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder: Path = tmp_path_factory.mktemp("models")
    with running_hub() as hub, pool(folder) as made:
        hub.add(REPO, FILES)
        made.up(f"hub.endpoint={hub.url}")
        for name in NODES:
            cache = environment(HF_HOME=str(folder / f"{name}-cache"))
            made.join(name, *MLX, "models.use_huggingface_cache=true", wait=False, env=cache)
        for name in NODES:
            until(lambda name=name: made.serves(name), 60, f"{name} serves")
        yield Lab(made, hub)


@pytest.fixture
def page(context: BrowserContext, lab: Lab) -> Page:
    made = context.new_page()
    made.goto(link(lab.pool))
    expect(made.get_by_role("meter")).to_have_count(2)
    go(made, "Models")
    return made


def ask_for_plan(page: Page, repo: str) -> Locator:
    """Ask for the plan of a pull; return the card of the form."""
    card = page.get_by_role("region", name="Pull a model")
    card.get_by_label("Repository").fill(repo)
    card.get_by_role("button", name="Show the plan").click()
    return card


def test_a_refusal_of_the_hub_is_shown_as_a_sentence(page: Page, lab: Lab):
    card = ask_for_plan(page, "lab/nothing")
    expect(card.get_by_role("alert")).to_contain_text("lab/nothing")
    gated = {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"}
    lab.hub.faults.answers.append(Answer("lab/gated", 403, gated, times=10))
    ask_for_plan(page, "lab/gated")
    expect(card.get_by_role("alert")).to_contain_text("gated")
    expect(card.get_by_role("region", name="Plan of the pull")).to_have_count(0)


def test_a_model_is_pulled_loaded_unloaded_and_deleted(page: Page, lab: Lab):
    form = ask_for_plan(page, REPO)
    plan = form.get_by_role("region", name="Plan of the pull")
    for name in NODES:
        expect(plan.get_by_role("row").filter(has_text=name)).to_contain_text("yes")
    expect(form).to_contain_text(re.compile(r"lab/tiny at [0-9a-f]{8}: 1\.4 MiB in \d files"))
    sound(page, "the plan of a pull")
    lab.hub.faults.chunk_seconds = SLOW_CHUNK_SECONDS
    form.get_by_role("button", name="Pull to 2 Macs").click()
    expect(page.get_by_text(f"The pull of {REPO} has started.")).to_be_visible()
    pulled = page.get_by_role("group", name=f"Pull of {REPO}").first
    expect(pulled.get_by_text(re.compile(r"[KM]iB of 1\.4 MiB from the hub, .*/s"))).to_be_visible()
    expect(pulled.get_by_role("progressbar").first).to_be_visible()
    sound(page, "a running pull")
    lab.hub.faults.chunk_seconds = 0.0
    expect(pulled.get_by_role("status").get_by_text("completed")).to_be_visible()

    card = page.get_by_role("region", name=REPO, exact=True)
    for name in NODES:
        expect(card.get_by_role("listitem").filter(has_text=f"{name}: on disk")).to_contain_text("same content")
    copy = card.get_by_role("listitem").filter(has_text="mini:")
    card.get_by_role("button", name=f"Load {REPO} on mini").click()
    expect(copy).to_contain_text("mini: loaded")
    expect(page.get_by_text(f"{REPO} on mini is loaded.")).to_be_visible()
    sound(page, "a loaded model")
    card.get_by_role("button", name=f"Unload {REPO} on mini").click()
    expect(copy).to_contain_text("mini: on disk")

    card.get_by_role("button", name=f"Verify {REPO} on mini").click()
    expect(page.get_by_text(f"{REPO} on mini: all files read, content")).to_be_visible()
    card.get_by_role("button", name=f"Want {REPO}").click()
    expect(card.get_by_text("wish met")).to_be_visible()
    card.get_by_role("button", name=f"Unwant {REPO}").click()
    expect(card.get_by_text("wish met")).to_have_count(0)
    for name in NODES:
        unload = card.get_by_role("button", name=f"Unload {REPO} on {name}")
        if unload.count():
            unload.click()

    page.get_by_label("Search").fill("macpool")
    expect(card).to_have_count(0)
    page.get_by_label("Search").fill("TINY")
    asked = list[str]()

    def accept(dialog: Dialog) -> None:
        asked.append(dialog.message)
        dialog.accept()

    page.on("dialog", accept)
    for name in NODES:
        card.get_by_role("button", name=f"Delete {REPO} on {name}").click()
        expect(page.get_by_text(re.compile(rf"{REPO} on {name} is deleted, 1\.\d MiB freed"))).to_be_visible()
    expect(card).to_have_count(0)
    assert asked == [f"Delete {REPO} on {name}? Its files of 1.4 MiB are removed from the disk." for name in NODES]
    assert REPO not in {model["name"] for model in lab.pool.get("/api/v1/models")["models"]}


def test_a_running_pull_is_cancelled(page: Page, lab: Lab):
    form = ask_for_plan(page, REPO)
    form.get_by_label("These Macs:").check()
    form.get_by_label("Pull to mini").check()
    expect(form.get_by_role("button", name="Pull to 1 Mac")).to_be_enabled()
    lab.hub.faults.chunk_seconds = SLOW_CHUNK_SECONDS
    form.get_by_role("button", name="Pull to 1 Mac").click()
    pulled = page.get_by_role("group", name=f"Pull of {REPO}").first
    pulled.get_by_role("button", name=f"Cancel the pull of {REPO}").click()
    expect(pulled.get_by_role("status").get_by_text("cancelled")).to_be_visible()
    lab.hub.faults.chunk_seconds = 0.0
