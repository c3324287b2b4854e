"""A pytest plugin (`-p tests.support.history`) that records order, worker, duration and result of each test.

`--history FILE` writes a History as JSON at the end of a run. `--in-order FILE` runs the tests in the order of their
ids in that file, one a line.
"""

import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest


@dataclass
class Failure:
    """A test that failed: its id, the worker that ran it, the load of the machine and the text of its error."""

    test: str
    worker: str
    load: float
    """Processes that ran or waited for a core in the last minute (`os.getloadavg`)."""
    at: str
    text: str


@dataclass
class History:
    """Record of one run of pytest."""

    random_seed: int | None = None
    """The seed of pytest-randomly."""
    workers: dict[str, list[tuple[str, float]]] = field(default_factory=dict[str, list[tuple[str, float]]])
    """Tests of each worker in the order in which they ran, with the seconds of each including its fixtures."""
    failures: list[Failure] = field(default_factory=list[Failure])
    exit_code: int = 0
    """Exit code of the process."""

    @property
    def failed(self) -> list[str]:
        """Return the ids of the failed tests, each once."""
        return list(dict.fromkeys(failure.test for failure in self.failures))

    @classmethod
    def read(cls, path: Path) -> "History":
        """Read the file that a run wrote."""
        found: dict[str, Any] = json.loads(path.read_text())
        failures = [Failure(**one) for one in found.pop("failures")]
        return cls(failures=failures, **found)


class Recorder:
    """Fills a History from pytest's reports, in the process that collects them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.history = History()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add one phase of a test to its worker's order, and a failure where it failed."""
        node = getattr(report, "node", None)
        worker = node.gateway.id if node is not None else "main"
        order = self.history.workers.setdefault(worker, [])
        if order and order[-1][0] == report.nodeid:
            order[-1] = (report.nodeid, order[-1][1] + report.duration)
        else:
            order.append((report.nodeid, report.duration))
        if report.failed:
            at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            text = report.longreprtext[-4000:]
            self.history.failures.append(Failure(report.nodeid, worker, os.getloadavg()[0], at, text))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the history."""
        self.history.random_seed = session.config.getoption("randomly_seed", None)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(asdict(self.history)))


class Ordered:
    """Puts tests into a given order, independent of random seeds and fixtures."""

    def __init__(self, path: Path) -> None:
        self._places = {test: place for place, test in enumerate(path.read_text().splitlines())}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Sort the tests; unlisted tests come last."""
        items.sort(key=lambda item: self._places.get(item.nodeid, len(self._places)))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the two options."""
    parser.addoption("--history", type=Path, metavar="FILE", help="Write what ran to FILE, as JSON.")
    parser.addoption("--in-order", type=Path, metavar="FILE", help="Run tests in the order of the ids in FILE.")


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugins that the options request. In a worker of xdist, the history belongs to the parent
    process."""
    history: Path | None = config.getoption("history")
    order: Path | None = config.getoption("in_order")
    if history is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(history))
    if order is not None:
        config.pluginmanager.register(Ordered(order))
