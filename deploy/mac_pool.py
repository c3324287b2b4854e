"""Entries of the Mac check about the command `cluster`: its speed, and the endpoint under the Mac's name on the LAN."""

import re
import resource
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request

from deploy.outcome import ROOT, Outcome, ToolError, create_outcome, run_tool

CLI = (sys.executable, "-m", "coordinator.cli")
MAX_HELP_CPU_SECONDS = 0.15
"""Maximum CPU time of `cluster --help` in seconds, because completion and help must be fast."""
RUNS = 5
"""Number of measured runs."""
START_TIMEOUT_SECONDS = 60.0
"""Maximum wait for the start message of `cluster up`, in seconds."""
STOP_TIMEOUT_SECONDS = 30.0
"""Seconds between SIGTERM and SIGKILL for `cluster up`."""


def check_help_cpu() -> Outcome:
    """Check that the minimum CPU time of `RUNS` runs of `cluster --help` is at most `MAX_HELP_CPU_SECONDS`.

    Raise `ToolError` if the command fails.
    """
    took = min(_measure_cpu() for _ in range(RUNS))
    return create_outcome(took <= MAX_HELP_CPU_SECONDS, f"{took:.3f} s of CPU, {MAX_HELP_CPU_SECONDS} s allowed")


def _measure_cpu() -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run_tool(*CLI, "--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def check_local_name() -> Outcome:
    """Check that a coordinator on all interfaces answers `/livez` under the name NAME.local that it prints.

    NAME must be the LocalHostName of this Mac.
    """
    with tempfile.TemporaryDirectory(prefix="mp-") as folder:
        command = [
            *CLI,
            "up",
            "--state",
            folder,
            "--listen",
            "0.0.0.0:0",
            "--cluster-listen",
            "127.0.0.1:0",
            "--no-local-node",
            "--set",
            "cluster.bonjour=false",
            "--set",
            "http.tls=off",
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
            timer = threading.Timer(START_TIMEOUT_SECONDS, child.kill)
            timer.start()
            try:
                return _check_livez(_read_start_message(child))
            finally:
                timer.cancel()
                child.terminate()
                _kill_unless_ended(child)


def _kill_unless_ended(child: subprocess.Popen[str]) -> None:
    try:
        child.wait(STOP_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()


def _read_start_message(child: subprocess.Popen[str]) -> str:
    """Read until the last line of the start message, and return the message."""
    assert child.stdout is not None  # noqa: S101  it was asked for
    lines: list[str] = []
    for line in child.stdout:
        lines.append(line)
        if "Ctrl-C" in line:
            break
    return "".join(lines)


def _check_livez(printed: str) -> Outcome:
    found = re.search(r"(http://(\S+)\.local:\d+)/v1", printed)
    if found is None:
        text = f"`cluster up` printed no NAME.local within {START_TIMEOUT_SECONDS:g} s"
        return create_outcome(good=False, text=text)
    try:
        own = run_tool("/usr/sbin/scutil", "--get", "LocalHostName").strip()
    except ToolError as error:
        return create_outcome(good=False, text=str(error))
    is_own = found[2].casefold() == own.casefold()
    says = f"printed {'the' if is_own else 'another name than the'} LocalHostName"  # reports contain no name
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(found[1] + "/livez", timeout=10) as answer:
            return create_outcome(is_own and answer.status == 200, f"{says}, /livez answers {answer.status}")
    except (OSError, urllib.error.URLError) as error:
        return create_outcome(good=False, text=f"{says}: {error}")
