"""The page: time until its first bars appear, and the CPU time of the coordinator for an open page."""

import statistics
import time
from pathlib import Path

import psutil

from tests.bench.row import Row, commit
from tests.browser.chromium import CHROMIUM, FLAGS, NAMES
from tests.support.processes import pool

NODES, VISITS, SECONDS = 3, 7, 10.0


def bench_page(folder: Path) -> list[Row]:
    """Measure the time from navigation to the first bars, and CPU for each viewer; needs Chromium."""
    from playwright.sync_api import sync_playwright

    if CHROMIUM is None:
        raise RuntimeError(f"Chromium is not installed ({', '.join(NAMES)}): on Debian, apt-get install {NAMES[0]}")
    with pool(folder) as made, sync_playwright() as driver:
        made.up()
        for number in range(NODES):
            made.join(f"node-{number}")
        assert made.coordinator is not None
        process = psutil.Process(made.coordinator.pid)
        alone = _share(process)
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        firsts: list[float] = []
        for _ in range(VISITS):
            page = browser.new_context().new_page()
            url = made.cli("open", "--print")["url"]
            began = time.monotonic()
            page.goto(url)
            page.get_by_role("meter").first.wait_for()
            firsts.append(time.monotonic() - began)
        each = (_share(process) - alone) / VISITS
        browser.close()
    first = statistics.median(firsts)
    return [
        Row("page, first bars", "<= 1 s", f"{first:.2f} s", first <= 1, commit()),
        Row("page, one viewer", "<= 1 % of a core", f"{each:.2f} %", each <= 1, commit()),
    ]


def _share(process: psutil.Process) -> float:
    """Return the share of a core that a process uses, in percent."""
    before, began = sum(process.cpu_times()[:2]), time.monotonic()
    time.sleep(SECONDS)
    return (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - began) * 100
