"""The manual as a site: accessible in both colour schemes, readable on a phone, without requests to other hosts."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser

from tests.browser.chromium import CHROMIUM
from tests.effort import thin_cases
from tests.support.processes import ROOT, environment

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")]
WITH_ALL_ELEMENTS = ("index.md", "start.md", "cli.md", "security.md")
"""Pages that together have every kind of element. In the dark scheme only the colours differ."""
RULES = {"rules": {"landmark-unique": {"enabled": False}}, "resultTypes": ["violations"]}
"""All rules of axe except one that the theme's copy buttons break: each is a nav element without a name.

Axe describes only violations. The description of all other elements takes twice as long as the rules."""
PAGES = sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").glob("*.md"))


OTHERS = [name for name in PAGES if name not in WITH_ALL_ELEMENTS]
TODAY = [*WITH_ALL_ELEMENTS, *thin_cases(OTHERS, 4)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    mkdocs = shutil.which("mkdocs", path=str(Path(sys.executable).parent))
    assert mkdocs
    command = [mkdocs, "build", "--quiet", "--strict", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, env=environment(NO_MKDOCS_2_WARNING="1"), check=True, timeout=120)
    return folder


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_of_the_manual_is_accessible(site: Path, browser: Browser, scheme: Literal["light", "dark"]):
    context = browser.new_context(color_scheme=scheme)
    page = context.new_page()
    wrong = dict[str, list[tuple[str, list[str]]]]()
    light = [*WITH_ALL_ELEMENTS, *thin_cases(OTHERS, 12)]
    for name in light if scheme == "light" else thin_cases(WITH_ALL_ELEMENTS, 2):
        page.goto((site / name.replace(".md", ".html")).as_uri())
        found = Axe().run(page, options=RULES).response["violations"]
        if found:
            wrong[name] = [(one["id"], [node["target"][0] for node in one["nodes"]][:5]) for one in found]
    context.close()
    assert wrong == {}


def test_no_page_of_the_manual_is_wider_than_a_phone_or_requests_another_host(site: Path, browser: Browser):
    asked = list[str]()
    context = browser.new_context(viewport={"width": 390, "height": 844})
    context.on("request", lambda request: asked.append(request.url))
    page = context.new_page()
    wide = list[str]()
    for name in TODAY:
        page.goto((site / name.replace(".md", ".html")).as_uri())
        if page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"):
            wide.append(name)
    context.close()
    assert wide == []
    assert len(asked) > len(TODAY)
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
