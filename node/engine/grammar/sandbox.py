"""Sandbox of grammar compilation: check in a separate process whether a grammar can be compiled.

The separate process is started again after it has ended during a check, and ends with this process. The limit of a
check is CPU time, because a busy Mac must accept the same grammars as an idle one. The limit of elapsed time
(`TIMEOUT_SECONDS`) is for a process that gets hardly any CPU time.
"""

import contextlib
import select
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from typing import IO, cast

from host.subprocesses import describe_exit

CPU_LIMIT_SECONDS = 0.05
"""Maximum CPU seconds of the check of one grammar. A hundred tools of three parameters take 0.03 s."""
TIMEOUT_SECONDS = 3.0
"""Maximum elapsed seconds of the check of one grammar."""
TOO_LONG = "it takes too long to compile: simplify it or its patterns"
"""Fault of a grammar that exceeds a time limit."""


class SandboxClient:
    """Client of a sandbox process, used by one thread at a time. `cpu` is the limit of CPU seconds for a grammar."""

    def __init__(self, cpu: float = CPU_LIMIT_SECONDS) -> None:
        self._cpu = cpu
        self._child: subprocess.Popen[bytes] | None = None

    def find_fault(self, grammar: str) -> str:
        """Return the fault of a grammar (llguidance's JSON or Lark); empty if it can be compiled.

        If the process exceeds a time limit, start another process and return `TOO_LONG`. If it ends for another reason,
        start another process and return how it ended, for example by SIGKILL for lack of memory. A process that ended
        before the check is replaced first. Raise `OSError` if no process can be started; the next call tries again.
        """
        if self._child is not None and self._child.poll() is not None:  # it has ended, but not by this grammar
            self._end()
        child, timed_out, answer = self._child or self.start(), False, None
        try:
            answer = self._compile(child, grammar.encode())
        except TimeoutError:
            timed_out = True
        except OSError:
            pass  # it has ended
        if answer is not None:
            return answer
        self._end()
        self.start()
        if timed_out or child.returncode == -signal.SIGPROF:
            return TOO_LONG
        return f"its compiler {describe_exit(child.returncode)}: simplify it or its patterns"

    def start(self) -> "subprocess.Popen[bytes]":
        """Start the sandbox process and return it, without waiting until it is ready. Raise `OSError` if that fails.

        The time that the process takes to start counts toward `TIMEOUT_SECONDS` of the first check, but not toward the
        CPU time of that check.
        """
        script = Path(__file__).with_name("sandbox_main.py")
        child = subprocess.Popen(
            [sys.executable, "-I", str(script), str(self._cpu)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        weakref.finalize(self, _kill, child)
        self._child = child
        return child

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            _kill(child)

    def _compile(self, child: "subprocess.Popen[bytes]", text: bytes) -> str | None:
        source, sink = cast("IO[bytes]", child.stdin), cast("IO[bytes]", child.stdout)
        source.write(len(text).to_bytes(4) + text)
        source.flush()
        if not select.select([sink], [], [], TIMEOUT_SECONDS)[0]:
            raise TimeoutError
        head = sink.read(4)
        return sink.read(int.from_bytes(head)).decode() if len(head) == 4 else None


def _kill(child: "subprocess.Popen[bytes]") -> None:
    """Kill the process and close its pipes."""
    child.kill()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    child.wait()
