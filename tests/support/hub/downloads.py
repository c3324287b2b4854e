"""Downloads by the real child process `node.hub.downloader`, for tests."""

import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil

from node.hub.child_messages import ChildEnd, ChildMessage, ChildProgress, DownloadOrder
from tests.support.processes import ROOT, environment
from wire.models.files import ModelManifest, ModelSource, SourceKind

PIECE = 64 * 1024
"""Bytes of a piece in tests."""


def list_children(word: str) -> list[psutil.Process]:
    """Return the running children of this process with a word in their command lines."""
    found = list[psutil.Process]()
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # a zombie, or a child that has just ended
            if any(word in part for part in child.cmdline()):
                found.append(child)
    return found


class Child:
    """A child process for model files, with the messages that it has sent."""

    def __init__(self, module: str, order: Any, log: Path) -> None:
        self._log = log
        with log.open("ab") as errors:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment(),
                cwd=ROOT,
            )
        assert self.popen.stdin is not None
        self.popen.stdin.write(msgspec.json.encode(order) + b"\n")
        self.popen.stdin.flush()
        self.progress: list[ChildProgress] = []

    def read(self) -> ChildMessage | None:
        """Return the next message; None at the end of the output."""
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        message = msgspec.json.decode(line, type=ChildMessage) if line else None
        if isinstance(message, ChildProgress):
            self.progress.append(message)
        return message

    def wait_end(self) -> ChildEnd:
        """Return the end of the order; raise AssertionError if the process ends without one."""
        while not isinstance(message := self.read(), ChildEnd):
            assert message is not None, self._log.read_text()
        return message

    def end_agent(self) -> None:
        """Close the standard input, as at the end of the agent."""
        assert self.popen.stdin is not None
        self.popen.stdin.close()

    def close(self) -> None:
        """End the process in any state."""
        self.popen.kill()
        self.popen.wait()
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


def hub_source(url: str, token: str = "") -> ModelSource:
    return ModelSource(SourceKind.HUB, url, token)


def download_order(
    folder: Path, manifest: ModelManifest, sources: Sequence[ModelSource], **fields: Any
) -> DownloadOrder:
    """Return an order with small pieces, a cache and a digest store below `folder`."""
    tests: dict[str, Any] = {"piece_bytes": PIECE, "reserve_bytes": 0, "source_timeout_seconds": 1.0}
    return DownloadOrder(
        manifest=manifest,
        sources=tuple(sources),
        hub=str(folder / "hub"),
        digests=str(folder / "state" / "digests.json"),
        **{**tests, **fields},
    )


def download(folder: Path, manifest: ModelManifest, sources: Sequence[ModelSource], **fields: Any) -> ChildEnd:
    """Run a download and return its end."""
    child = Child("node.hub.downloader", download_order(folder, manifest, sources, **fields), folder / "downloader.log")
    try:
        return child.wait_end()
    finally:
        child.close()
