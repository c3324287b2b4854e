"""Every test runs with a hostile environment: junk where a developer may have settings, keys and proxies.

Property tests draw other examples each day: their seed is the date, or `HYPOTHESIS_SEED`, and is printed at the end.
What failed once is kept in .hypothesis/ and tried first.
"""

import gc
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from tests import models
from tests.support.processes import Pool, pool

JUNK = {
    "MACPOOL_STATE": "/nonexistent/state",
    "MACPOOL_URL": "http://127.0.0.1:1",
    "MACPOOL_MEMORY__CAP": "junk",
    "MACPOOL_ROUTER__POLICY": "junk",
    "OPENAI_API_KEY": "junk",
    "OPENAI_BASE_URL": "http://127.0.0.1:1/v1",
    "HF_HOME": "/nonexistent/huggingface",
    "HTTP_PROXY": "http://127.0.0.1:1",
    "HTTPS_PROXY": "http://127.0.0.1:1",
    "ALL_PROXY": "http://127.0.0.1:1",
}
os.environ.update(JUNK)
# How long an example takes is no property of the code: the machine may be busy. pytest's own limit ends what hangs.
settings.register_profile(
    "macpool",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=False,
    print_blob=True,
    database=DirectoryBasedExampleDatabase(Path(__file__).parents[1] / ".hypothesis" / "examples"),
)
settings.load_profile("macpool")
SEED = int(os.environ.get("HYPOTHESIS_SEED") or f"{date.today():%Y%m%d}")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # under nohup: children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
MODEL_SECONDS = 900
"""Limit of a test that runs a tiny model on MLX, which is slow where OpenBLAS is not installed."""
UNLISTED_SKIP = 10
"""Exit code of pytest when a skip is not listed in CI: none of its own, so that no second try of a test hides it."""


@pytest.fixture
def cluster_pool() -> Iterator[Pool]:
    """An empty pool in a short temporary folder (some socket paths are limited to 103 bytes)."""
    with tempfile.TemporaryDirectory(prefix="mp-") as folder, pool(Path(folder)) as made:
        yield made


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., Path]:
    """`tests.models.path`."""
    return models.path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Seed property tests, give tests with models more time, and order the tests of a worker."""
    for item in items:
        function: Any = getattr(item, "obj", None)
        if getattr(function, "is_hypothesis_test", False):
            hypothesis.seed(SEED)(getattr(function, "__func__", function))
        if "tiny_model" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(MODEL_SECONDS))
    if "PYTEST_XDIST_WORKER" in os.environ:
        _longest_first(items)


def pytest_collection_finish() -> None:
    """Keep what was collected out of the garbage collector: a full collection, of which the engine makes many, would
    look at 630,000 objects of ten thousand tests, for 0.4 s each time."""
    gc.collect()
    gc.freeze()


def _longest_first(items: list[pytest.Item]) -> None:
    """Begin with the modules that start processes, with the longest limits first, and leave the order as it is else.

    A worker that has nothing left takes from the end of another's list, so what is short has to stand there: else one
    of them waits for minutes while the other does the longest test of all.
    """
    limits: dict[Path, float] = {}
    for item in items:
        if item.get_closest_marker("slow") is not None:
            limit = item.get_closest_marker("timeout")
            seconds = float(limit.args[0]) if limit is not None else float(item.config.getini("timeout"))
            limits[item.path] = max(seconds, limits.get(item.path, 0.0))
    items.sort(key=lambda item: -limits.get(item.path, 0.0))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
    """Print what tests want seen (`record_property("seen", …)`); print every skip's reason, and fail CI for one that
    tests/skips.txt does not list."""
    terminalreporter.write_line(f"seed of property tests: {SEED} (HYPOTHESIS_SEED={SEED} repeats it)")
    for report in terminalreporter.stats.get("passed", []):
        for name, text in report.user_properties:
            if name == "seen":
                terminalreporter.write_line(str(text))
    if not os.environ.get("CI"):
        return
    listed = [
        line for line in (Path(__file__).parent / "skips.txt").read_text().splitlines() if line[:1] not in ("", "#")
    ]
    for report in terminalreporter.stats.get("skipped", []):
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        if not any(entry in reason for entry in listed):
            terminalreporter.write_line(f"UNLISTED SKIP {report.nodeid}: {reason}", red=True)
            session: Any = terminalreporter._session  # pyright: ignore[reportPrivateUsage]  pytest has no other way to the exit status here
            session.exitstatus = UNLISTED_SKIP
