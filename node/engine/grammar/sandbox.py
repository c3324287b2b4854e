"""Asks a process of its own whether a grammar can be compiled, before anybody compiles it who cannot be spared.

The process is started at the first question and again after it died of one; when this one ends, it ends. Its CPU is
limited by a timer, not by the clock: a busy Mac refuses nothing that an idle one takes. The clock has the last word
only where the process gets no CPU at all.
"""

import contextlib
import select
import subprocess
import sys
import weakref
from pathlib import Path
from typing import IO, cast

CPU = 0.05
"""Seconds of CPU that a grammar may take. A hundred tools of three parameters take 0.03."""
PATIENCE = 3.0
"""Seconds of the clock."""
TOO_LONG = "it takes too long to compile: make it smaller, or its patterns simpler"


class Vetting:
    """The process and how to ask it; for one thread."""

    def __init__(self, cpu: float = CPU) -> None:
        self._cpu = cpu
        self._child: subprocess.Popen[bytes] | None = None

    def why_not(self, grammar: str) -> str:
        """Say what is wrong with a grammar (llguidance's JSON or Lark); nothing if it can be compiled."""
        child = self._child or self.start()
        try:
            said = self._ask(child, grammar.encode())
        except OSError:
            said = None
        if said is not None:
            return said
        _end(child)
        self.start()
        return TOO_LONG

    def start(self) -> "subprocess.Popen[bytes]":
        """Start the process; it says nothing before it is asked, and what it costs to start is not the grammar's."""
        script = Path(__file__).with_name("sandbox_main.py")
        child = subprocess.Popen(
            [sys.executable, "-I", str(script), str(self._cpu)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        weakref.finalize(self, _end, child)
        self._child = child
        return child

    def _ask(self, child: "subprocess.Popen[bytes]", text: bytes) -> str | None:
        source, sink = cast("IO[bytes]", child.stdin), cast("IO[bytes]", child.stdout)
        source.write(len(text).to_bytes(4) + text)
        source.flush()
        if not select.select([sink], [], [], PATIENCE)[0]:
            return None
        head = sink.read(4)
        return sink.read(int.from_bytes(head)).decode() if len(head) == 4 else None


def _end(child: "subprocess.Popen[bytes]") -> None:
    """End the process and leave nothing of it."""
    child.kill()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    child.wait()
