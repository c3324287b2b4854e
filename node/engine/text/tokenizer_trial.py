"""Trial of a model's chat template and tokenizer in a separate process, before the engine uses them.

Both come with the model. An endless template, or a tokenizer's regular expression with unbounded time, would block an
engine thread and every request on it. The process loads the tokenizer and tokenizes some prompts
(`tokenizer_trial_main`), with limits of CPU time and memory. The fingerprint of a model that passed is stored, and the
model is not tried again on this machine with the same versions of `LIBRARIES`. A model that failed is tried again after
a restart of the engine.
"""

import os
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import msgspec
import structlog

from host.subprocesses import describe_exit
from node.engine.text.tokenizer_errors import TokenizerError
from node.memory.sensor import measure_footprint
from wire.units import MIB, show_size

CPU_LIMIT_SECONDS = 30
"""Limit of CPU seconds. Importing transformers takes 2 s, a tokenizer of 262,000 tokens 4 s, the prompts 1 s."""
TIMEOUT_SECONDS = 120.0
"""Limit of elapsed seconds of a trial. It exceeds `CPU_LIMIT_SECONDS`, because other processes also use the CPU."""
MEMORY_LIMIT_BYTES = 768 * MIB
"""Limit of the footprint of the process in bytes, in addition to 40 times the size of the tokenizer's files. With a
small tokenizer the footprint is 350 MB."""
MEMORY_PER_FILE_BYTE = 40
"""Bytes of the limit for each byte of the tokenizer's files."""
POLL_INTERVAL_SECONDS = 0.02
"""Seconds between two checks of the process."""
FILE = "trials.json"
"""Name of the file with the fingerprints that passed."""
MAX_RESULTS = 1024
"""Maximum number of stored fingerprints. The oldest fingerprint is removed first, and its model is then tried again."""
LIBRARIES = ("jinja2", "sentencepiece", "tokenizers", "transformers")
"""Packages that render templates and tokenize. Stored results with other versions of these are ignored."""
EXIT_NOT_LOADED = 3
"""Exit code of a process whose tokenizer cannot be loaded; `load` reports the reason."""
EXIT_PANICKED = 4
"""Exit code of a process whose native tokenizer panicked."""

log = structlog.get_logger("engine.trial")


class _Results(msgspec.Struct, frozen=True):
    """Content of the file of results."""

    versions: str
    passed: list[str]


class TokenizerTrials:
    """Trials of models' chat templates and tokenizers in a limited process, with their results by fingerprint.

    `folder` is the folder in which the fingerprints that passed are stored; None: in memory only. `cpu` is the limit of
    CPU seconds. `memory` is the limit of the footprint in bytes, in addition to `MEMORY_PER_FILE_BYTE` times the size
    of the tokenizer's files.
    """

    def __init__(self, folder: Path | None, *, cpu: int = CPU_LIMIT_SECONDS, memory: int = MEMORY_LIMIT_BYTES) -> None:
        self._file = None if folder is None else folder / FILE
        self._cpu = cpu
        self._memory = memory
        self._passed: dict[str, None] = dict.fromkeys(_read_passed(self._file))
        self._failed: dict[str, str] = {}

    def run(self, folder: Path, fingerprint: str, files: int) -> None:
        """Try the chat template and tokenizer in `folder`, unless the result for this fingerprint is known.

        `files` is the size of the tokenizer's files in bytes. A trial blocks the calling thread for at most about
        `TIMEOUT_SECONDS`. A pass is stored on the disk, and a failure in memory until the engine restarts. A tokenizer
        that cannot be loaded passes. Raise `TokenizerError` with the reason if this trial or an earlier one failed.
        Raise `OSError` if the process cannot be started.
        """
        if fingerprint in self._passed:
            return
        if fingerprint not in self._failed:
            began = time.monotonic()
            wrong = self._run_trial(folder, files)
            log.info("trial", model=folder.name, fault=wrong, seconds=round(time.monotonic() - began, 2))
            if not wrong:
                self._record_pass(fingerprint)
                return
            self._failed[fingerprint] = wrong
        raise TokenizerError(f"{folder.name}: {self._failed[fingerprint]}")

    def find_cause(self, fingerprint: str) -> str:
        """Return why the model with this fingerprint may not be used: the fault of its trial. Return an empty text if
        the model passed or was not tried yet."""
        return self._failed.get(fingerprint, "")

    def compute_need_bytes(self, fingerprint: str, files: int) -> int:
        """Return the bytes that a trial of the model with this fingerprint may take; 0 if the model was already tried.
        `files` is the size of the tokenizer's files in bytes."""
        tried = fingerprint in self._passed or fingerprint in self._failed
        return 0 if tried else self._memory + MEMORY_PER_FILE_BYTE * files

    def _run_trial(self, folder: Path, files: int) -> str:
        """Run the process; return the fault of the model, empty if there is none."""
        most, deadline = self._memory + MEMORY_PER_FILE_BYTE * files, time.monotonic() + TIMEOUT_SECONDS
        with subprocess.Popen(
            [sys.executable, "-P", "-m", "node.engine.text.tokenizer_trial_main", str(folder), str(self._cpu)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process:
            try:
                while process.poll() is None:
                    taken = measure_footprint((process.pid,)) or 0
                    if taken > most:
                        return (
                            f"its template or tokenizer took {show_size(taken)} for prompts of 20 kB "
                            f"(limit {show_size(most)}): it is not used"
                        )
                    if time.monotonic() > deadline:
                        return (
                            f"its template or tokenizer did not finish within {TIMEOUT_SECONDS:.0f} s: it is not used"
                        )
                    try:
                        process.wait(POLL_INTERVAL_SECONDS)
                    except subprocess.TimeoutExpired:
                        continue
            finally:
                if process.poll() is None:
                    process.kill()
        if process.returncode in (0, EXIT_NOT_LOADED):
            return ""
        if process.returncode == EXIT_PANICKED:
            return (
                "its tokenizer fails on prompts of 20 kB, for example because of its regular expression: it is not used"
            )
        if process.returncode == -signal.SIGPROF:
            return f"its template or tokenizer took more than {self._cpu} s for prompts of 20 kB: it is not used"
        return f"the trial of its template and tokenizer {describe_exit(process.returncode)}: it is not used"

    def _record_pass(self, fingerprint: str) -> None:
        self._passed[fingerprint] = None
        while len(self._passed) > MAX_RESULTS:
            del self._passed[next(iter(self._passed))]
        if self._file is None:
            return
        part = self._file.with_suffix(f".{os.getpid()}")
        try:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            part.write_bytes(msgspec.json.encode(_Results(_read_versions(), list(self._passed))))
            part.replace(self._file)
        except OSError as error:
            log.warning("tokenizer trials not stored", error=str(error)[:200])


def _read_passed(file: Path | None) -> list[str]:
    if file is None:
        return []
    try:
        results = msgspec.json.decode(file.read_bytes(), type=_Results)
    except FileNotFoundError:
        return []
    except (OSError, msgspec.DecodeError) as error:
        log.warning("tokenizer trials unreadable", error=str(error)[:200])
        return []
    return results.passed if results.versions == _read_versions() else []


def _read_versions() -> str:
    return " ".join(f"{name} {version(name)}" for name in LIBRARIES)
