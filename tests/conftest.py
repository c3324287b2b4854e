"""Run every test in a hostile environment: junk values where a developer may have settings, keys and proxies.

Property tests use other examples each day: their seed is the date, or `HYPOTHESIS_SEED`, and is printed at the end.
Failed examples are kept in .hypothesis/ and tried first.
"""

import asyncio
import gc
import os
import signal
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import certifi
import hypothesis
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from host.event_loop import MonotonicLoop
from host.imports import import_structlog
from tests import models
from tests.effort import IS_NIGHTLY, SEED, deal_slow_modules, scale_examples
from tests.support.processes import ROOT, Pool, pool

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
if not IS_NIGHTLY:
    # MLX compiles each fused function with g++, which takes 1 s of CPU time, and on a new machine in several workers.
    # Processes of pools compile them (`environment`), because they run as on a user's machine.
    os.environ["MLX_DISABLE_COMPILE"] = "1"
# Collection makes 630,000 objects and no garbage: full collections of them would be a tenth of its time.
gc.disable()
# With rich, which some tests import, structlog would spend 5 s of CPU on each traceback that it logs.
import_structlog()
# The duration of an example is no property of the code, because the machine may be busy. pytest's own limit ends
# hanging tests.
settings.register_profile(
    "macpool",
    max_examples=scale_examples(500),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=False,
    print_blob=True,
    database=DirectoryBasedExampleDatabase(Path(__file__).parents[1] / ".hypothesis" / "examples"),
)
settings.load_profile("macpool")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # under nohup: children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
MODEL_SECONDS = 900
"""Limit of a test that runs a tiny model on MLX, which is slow where OpenBLAS is not installed."""
NIGHTLY_TESTS = pytest.StashKey[int]()
"""Number of collected tests that only the nightly run has."""
UNLISTED_SKIP = 10
"""Exit code of pytest when a skip is not listed in CI. It differs from pytest's own, because a second try must not hide
it."""


def write_one_ca(bundle: Path) -> str:
    """Write the first certificate of a bundle to a file, and return its path.

    Every client of httpx reads the bundle of certifi, and every default TLS context that of the system, here and in
    processes that tests start. All certificates of a bundle take 36 ms of CPU, one takes 3 ms. No test connects to a
    public host.
    """
    end = "-----END CERTIFICATE-----\n"
    file = ROOT / ".cache" / "one_ca.pem"
    file.parent.mkdir(exist_ok=True)
    written = file.with_suffix(f".{os.getpid()}")
    written.write_text(bundle.read_text().partition(end)[0] + end)
    written.replace(file)
    return str(file)


ONE_CA = write_one_ca(Path(certifi.where()))
certifi.where = lambda: ONE_CA
os.environ["SSL_CERT_FILE"] = ONE_CA


@pytest.fixture
def cluster_pool() -> Iterator[Pool]:
    """Yield an empty pool in a short temporary folder (some socket paths are limited to 103 bytes)."""
    with tempfile.TemporaryDirectory(prefix="mp-") as folder, pool(Path(folder)) as made:
        yield made


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., Path]:
    """Return `tests.models.path`."""
    return models.path


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run asynchronous tests on the event loop of the product, which differs from asyncio's in options and errors.

    The tests of dialects use asyncio's loop. With uvloop, they do not notice faults of the fast path, probably because
    it takes only requests whose head and body arrive together.
    """
    if item.path.is_relative_to(ROOT / "tests" / "contract" / "dialects"):
        return {"asyncio": asyncio.SelectorEventLoop}
    return {"product": MonotonicLoop}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect nightly tests, seed property tests, give tests with models more time, and order the tests of a
    worker."""
    if not IS_NIGHTLY:
        _deselect_nightly(config, items)
    for item in items:
        function: Any = getattr(item, "obj", None)
        if getattr(function, "is_hypothesis_test", False):
            hypothesis.seed(SEED)(getattr(function, "__func__", function))
        if "tiny_model" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(MODEL_SECONDS))
    if "PYTEST_XDIST_WORKER" in os.environ:
        workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        items[:] = deal_slow_modules(items, lambda item: item.path, _get_limit, workers)


def pytest_collection_finish() -> None:
    """Exclude the collected tests from garbage collection.

    The engine triggers many full collections. Each would take 0.4 s for 630,000 objects of ten thousand tests.
    Collection makes no garbage, and one full collection before the tests would take 0.5 s of CPU in each worker.
    """
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """After the last test of a module, exclude the objects that its tests leave from garbage collection.

    Applications, caches of Hypothesis and imported modules add 400,000 objects during a run. Without this hook every
    full collection of the engine takes up to 0.3 s for them.
    """
    answer = yield
    if nextitem is not None and nextitem.path != item.path:
        _freeze_objects()
    return answer


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remove the keywords and the captured output from the report of a passed phase, in a worker of xdist.

    The worker sends 40,000 reports to its controller, which reads neither.
    """
    report = yield
    if report.passed and "PYTEST_XDIST_WORKER" in os.environ:
        report.keywords, report.sections = {}, []
    return report


def _freeze_objects() -> None:
    """Free all garbage, and exclude the other objects from later collections."""
    gc.collect()
    gc.freeze()


def _deselect_nightly(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests with the marker `nightly`. A worker of xdist reports their number to its controller."""
    nightly = [item for item in items if item.get_closest_marker("nightly") is not None]
    if not nightly:
        return
    items[:] = [item for item in items if item not in nightly]
    config.hook.pytest_deselected(items=nightly)
    config.stash[NIGHTLY_TESTS] = len(nightly)
    if "PYTEST_XDIST_WORKER" in os.environ:
        output: dict[str, Any] = getattr(config, "workeroutput", {})
        output["nightly"] = len(nightly)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Store the number of nightly tests that a worker of xdist reported. Every worker collects all tests."""
    count = getattr(node, "workeroutput", {}).get("nightly")
    if count is not None:
        node.config.stash[NIGHTLY_TESTS] = count


def _get_limit(item: pytest.Item) -> float:
    """Return the time limit of a test that starts processes, in seconds; 0 for other tests."""
    if item.get_closest_marker("slow") is None:
        return 0.0
    limit = item.get_closest_marker("timeout")
    return float(limit.args[0] if limit is not None else item.config.getini("timeout"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
    """Print the number of nightly tests, recorded properties of tests (`record_property("seen", …)`) and the reason of
    every skip.

    In CI a skip that tests/skips.txt does not list is a failure.
    """
    terminalreporter.write_line(f"seed of property tests: {SEED} (HYPOTHESIS_SEED={SEED} repeats it)")
    nightly = terminalreporter.config.stash.get(NIGHTLY_TESTS, 0)
    if nightly:
        terminalreporter.write_line(f"nightly tests that did not run: {nightly} (`make nightly` runs them)")
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
