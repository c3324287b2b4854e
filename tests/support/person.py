"""A user at a Mac of the lab: types commands into a terminal of 80 columns and has a home folder."""

import fcntl
import os
import pty
import re
import shlex
import signal
import struct
import subprocess
import termios
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.support.cluster.hosts import Host
from tests.support.processes import CLI, Pool, Process, environment, until

TRUSTED = ("/etc/ssl", "/usr/local/share", "/etc/ca-certificates")
"""Folders that `cluster trust-ca` changes. Each host gets its own copy."""
QUICK = {"MACPOOL_MODELS__PROFILE": "off", "MACPOOL_MODELS__TRIAL": "false"}
"""Variables without the measurement and the trial of a model, as `MLX` in `engine_pool`."""
MACHINE_ID = "/etc/machine-id"
SECONDS = 60
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Person:
    """A user on one host. `seen` is the complete output."""

    def __init__(self, host: Host, stack: ExitStack) -> None:
        self.host = host
        self.home = host.folder / "home"
        self.home.mkdir()
        self.variables: dict[str, str] = {}
        self.seen: list[str] = []
        self._stack = stack
        bin_folder = host.folder / "bin"
        bin_folder.mkdir()
        for name in ("cluster", "macpool"):
            shim = bin_folder / name
            shim.write_text(f'#!/bin/sh\nexec {shlex.join(CLI)} "$@"\n')
            shim.chmod(0o755)
        self._path = bin_folder
        self._thread = stack.enter_context(host.threads(1))
        for place in (*TRUSTED, MACHINE_ID):
            if Path(place).exists():
                copy = host.folder / place.strip("/").replace("/", "-")
                subprocess.run(["cp", "-a", place, str(copy)], check=True)
                if place == MACHINE_ID:
                    copy.write_text(f"{host.number:032x}\n")
                subprocess.run([*host.enter(), "mount", "--bind", str(copy), place], check=True)

    def environment(self) -> dict[str, str]:
        """Return the variables of this user's shell."""
        known = environment(HOME=str(self.home), COLUMNS="80", LINES="24", **self.variables)
        # A user's shell names no authorities; the tests' own environment does (tests/conftest.py).
        kept = {name: value for name, value in known.items() if name != "SSL_CERT_FILE" or name in self.variables}
        return kept | {"PATH": f"{self._path}:{kept['PATH']}", "XDG_DATA_HOME": "", "XDG_CONFIG_HOME": ""}

    def type(self, line: str, *, code: int = 0, answer: str = "") -> str:
        """Run a shell line with the input `answer`, and return its output.

        Raise AssertionError for another exit code than `code`, or for a traceback.
        """
        done = subprocess.run(
            [*self.host.enter(), "sh", "-c", line],
            capture_output=True,
            text=True,
            input=answer,
            env=self.environment(),
            timeout=SECONDS,
        )
        said = f"{self.host.name}$ {line}\n{done.stdout}{done.stderr}"
        self.seen.append(said)
        assert done.returncode == code, f"exit code {done.returncode}, not {code}:\n{said}"
        assert "Traceback" not in said, said
        return done.stdout + done.stderr

    def get(self, path: str) -> dict[str, Any]:
        """Send a GET to the coordinator of this host. A command would take a hundred times the CPU time."""
        (run,) = self.home.rglob("run.json")
        made = Pool(run.parents[1])
        made.home = run.parent.name
        made.call = lambda ask: self._thread.submit(ask).result()
        return made.get(path)

    def look(self, line: str) -> Sequence[str]:
        """Run a line in a terminal of 80 columns, and return the visible lines.

        Raise AssertionError for a wider line, another exit code than 0, or a traceback.
        """
        leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        process = subprocess.Popen(
            [*self.host.enter(), "sh", "-c", line],
            stdin=follower,
            stdout=follower,
            stderr=follower,
            env=self.environment() | {"TERM": "xterm-256color"},
            start_new_session=True,
        )
        os.close(follower)
        printed = b""
        try:
            while piece := os.read(leader, 65536):
                printed += piece
        except OSError:  # Linux reports the closed end of a terminal like this
            pass
        finally:
            os.close(leader)
        code = process.wait(SECONDS)
        text = ESCAPES.sub("", printed.decode()).replace("\r\n", "\n")
        self.seen.append(f"{self.host.name}$ {line}\n{text}")
        assert (code, "Traceback" in text) == (0, False), text
        lines = [one.rstrip() for one in text.splitlines()]
        wide = [one for one in lines if len(one) > 80]
        assert not wide, "wider than 80 columns:\n" + text
        return lines

    def start(self, line: str) -> "Started":
        """Run a line that keeps running, as in a terminal window of its own."""
        number = len(list(self.host.folder.glob("*.err")))
        process = Process(
            ["sh", "-c", f"exec {line}"] if "|" not in line else ["sh", "-c", line],
            self.host.folder / f"{number}.err",
            wrap=self.host.enter(),
            env=self.environment(),
        )
        self._stack.callback(process.close)
        return Started(line, process)


class Started:
    """A command that runs until Ctrl-C."""

    def __init__(self, line: str, process: Process) -> None:
        self._line = line
        self.process = process

    def said(self) -> str:
        """Return the complete output."""
        return "".join(self.process.output) + self.process.log.read_text()

    def until(self, pattern: str, seconds: float = SECONDS) -> re.Match[str]:
        """Wait for a line that matches `pattern`. Raise AssertionError with the output if none comes."""

        def found() -> re.Match[str] | None:
            ended = self.process.popen.poll() is not None
            match = re.search(pattern, self.said(), re.MULTILINE)
            assert match or not ended, f"ended with {self.process.popen.returncode} before {pattern!r}"
            return match

        try:
            return until(found, seconds, pattern)
        except AssertionError as error:
            raise AssertionError(f"$ {self._line}\n{self.said()}\n{error}") from None

    def interrupt(self, seconds: float = 40) -> str:
        """Press Ctrl-C and return the output."""
        self.process.signal(signal.SIGINT)
        self.process.popen.wait(seconds)
        return self.said()
