"""A process that has imported pytest and large libraries, and forks for each run of tests.

Reads one JSON object a line: `{"tests": [...], "limit": seconds, "stop": bool}`. Writes one a line: pytest's exit code,
TIMED_OUT where the limit passed, the seconds of each test, and the last lines of the output. No module of the
project stays imported at the fork; each run therefore reads the current sources. The tests run in the working directory
of this process.
"""

import ctypes
import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

LIBRARIES = (
    "anyio",
    "click",
    "cryptography.x509",
    "fastapi",
    "httptools",
    "httpx",
    "huggingface_hub",
    "hypothesis.strategies",
    "ifaddr",
    "jinja2",
    "jsonschema",
    "llguidance.hf",
    "mlx.nn",
    "mlx_lm.generate",
    "mlx_lm.models.llama",
    "msgspec",
    "numpy",
    "openai",
    "platformdirs",
    "prometheus_client",
    "pydantic",
    "pytest_asyncio",
    "pytest_timeout",
    "rich.console",
    "schemathesis",
    "segno",
    "tokenizers",
    "uvicorn",
    "uvloop",
    "xdist.plugin",
    "zeroconf",
)
"""Imported before the fork if installed, because these imports take most of the start of a test run."""
NO_CACHE = "/nonexistent/huggingface"
"""HF_HOME of tests (tests/conftest.py). huggingface_hub reads it while it is imported."""
STRUCTLOG_IMPORT = "host.imports"
"""Imports structlog without rich. With rich, each logged traceback would take 5 s of CPU time."""
TIMED_OUT = 124
"""Takes the place of an exit code."""
IMPORTED_BEFORE = "ignore::pytest.PytestAssertRewriteWarning"
"""Hides pytest's warning that plugins imported before the fork are not rewritten."""
INTERNAL_ERROR = 3
"""pytest's exit code for its own errors."""
LOOK_SECONDS = 0.02
PR_SET_CHILD_SUBREAPER = 36
"""Linux, prctl(2): orphaned processes become children of this one, and can be ended."""


class Seconds:
    """A plugin that adds up the seconds of each test."""

    def __init__(self) -> None:
        self.taken: dict[str, float] = {}
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up set-up, call and tear-down."""
        self.taken[report.nodeid] = self.taken.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.failed.append(report.nodeid)


def _import_libraries() -> None:
    """Import the libraries that tests need, and forget the module of the project that does a part of it."""
    os.environ["HF_HOME"] = NO_CACHE
    importlib.import_module(STRUCTLOG_IMPORT).import_structlog()
    for name in (STRUCTLOG_IMPORT, STRUCTLOG_IMPORT.partition(".")[0]):
        del sys.modules[name]
    for library in LIBRARIES:
        with suppress(ImportError):
            importlib.import_module(library)


def _run(tests: list[str], stop: bool, log: Path, result: Path) -> int:
    """Run pytest in a forked process; return its exit code."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    seconds = Seconds()
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--no-header", "-W", IMPORTED_BEFORE]
    code = pytest.main([*options, *(["-x"] if stop else []), *tests], plugins=[seconds])
    result.write_text(json.dumps({"seconds": seconds.taken, "failed": seconds.failed}))
    sys.stdout.flush()
    return int(code)


def _wait(child: int, seconds: float) -> int:
    """Wait for a forked process; end it and all its children when its time is over.

    Orphaned processes that end meanwhile are reaped, because tests wait until processes no longer exist.
    """
    deadline = time.monotonic() + seconds
    code: int | None = None
    try:
        while code is None and time.monotonic() < deadline:
            ended, status = os.waitpid(-1, os.WNOHANG)
            if ended == child:
                code = os.waitstatus_to_exitcode(status)
            elif not ended:
                time.sleep(LOOK_SECONDS)
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        for left in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                left.kill()
        with suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
    return TIMED_OUT if code is None else code


def main() -> None:
    """Serve until the input ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _import_libraries()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="neuter-log-", dir=Path.cwd().parent) as folder:
        log, result = Path(folder) / "log", Path(folder) / "result"
        for line in sys.stdin:
            asked = json.loads(line)
            result.unlink(missing_ok=True)
            began = time.monotonic()
            child = os.fork()
            if child == 0:
                code = INTERNAL_ERROR
                try:
                    code = _run(asked["tests"], asked["stop"], log, result)
                except BaseException:
                    traceback.print_exc()
                os._exit(code)
            code = _wait(child, asked["limit"])
            answer = json.loads(result.read_text()) if result.is_file() else {"seconds": {}, "failed": []}
            last = log.read_text(errors="replace").strip().splitlines()[-3:]
            answer |= {"code": code, "took": time.monotonic() - began, "last": "\n".join(last)}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
