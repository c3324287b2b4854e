"""One Chromium for each module of tests, and a separate context for each test."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, BrowserContext, expect, sync_playwright

from tests.browser.chromium import CHROMIUM, FLAGS

WAIT = 15_000
expect.set_options(timeout=WAIT)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as made:
        assert CHROMIUM is not None
        running = made.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield running
        running.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    made = browser.new_context()
    made.set_default_timeout(WAIT)
    yield made
    made.close()
