"""Parent process of one worker: starts the worker, passes its job once the agent watches, and forwards its events.

The worker runs in its own process group, with a pipe of the parent as stdin. When the parent ends, for any reason, the
worker exits. When the agent ends, the parent kills the worker at once, because no process then watches its memory. The
parent has no state for a client: the agent reports the progress of the job.

The Ray actor (`node.video.worker.actor`) runs this module, or a person: `python -m node.video.worker.worker_parent
FOLDER LEASE GENERATION`.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec

from node.memory.sensor import read_process_identity
from node.video.worker.lease_files import (
    ATTENDED,
    CLAIM,
    EVENTS,
    GO,
    GRANT,
    GUARD,
    LOG,
    MAX_LINE_BYTES,
    SCRATCH,
    LeaseGrant,
    WorkerClaim,
    lock_file,
    read_grant,
    write_new,
)

WORKER = Path(__file__).with_name("worker.py")
POLL_INTERVAL_SECONDS = 0.05
"""Seconds between two checks for the agent's `go` file."""
GO_SECONDS = 30.0
"""Seconds that a started worker waits for the agent's `go` file before it is ended."""


class LeaseFenced(Exception):
    """Raised if a lease was never granted, has ended, was claimed before, or already has a parent process."""


class WorkerParent:
    """Parent of the worker of one lease: its id is `lease`, and its folder `folder`.

    `stop` may be called from any thread.
    """

    def __init__(self, folder: Path, lease: str, generation: int) -> None:
        self._folder = folder
        self._lease = lease
        self._generation = generation
        self._stopped = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._lock: int | None = None

    def run(self) -> int:
        """Run the worker to its end, and return its exit code, or the negative number of the signal that ended it.

        Raise `LeaseFenced` if the lease is not granted, already has a parent process or was claimed before. Raise
        `OSError` if the worker cannot be started, or a file of the lease's folder cannot be used.
        """
        grant = self._read_own_grant()
        self._lock = lock_file(self._folder / ATTENDED)
        if self._lock is None:
            raise LeaseFenced(f"{self._lease} already has a parent process")
        try:
            return self._run_worker(grant)
        finally:
            os.close(self._lock)

    def stop(self) -> None:
        """Kill the worker's process group at once, from any thread.

        `run` then returns, without writing an exit event. A worker that has not begun its job never begins it.
        """
        self._stopped.set()
        self._kill_worker()

    def _read_own_grant(self) -> LeaseGrant:
        grant = read_grant(self._folder)
        if grant is None or (grant.lease, grant.generation) != (self._lease, self._generation):
            raise LeaseFenced(f"generation {self._generation} of {self._lease} is not granted on this node")
        return grant

    def _run_worker(self, grant: LeaseGrant) -> int:
        process = self._process = self._start_worker(grant)
        try:
            self._write_claim(process.pid)
            threading.Thread(target=self._stop_when_unguarded, daemon=True).start()
            if self._wait_for_go():
                self._send_job(process, grant)
                self._forward_events(process)
        finally:
            self._kill_worker()
            code = process.wait()
            self._write_exit(code)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()
        return code

    def _start_worker(self, grant: LeaseGrant) -> subprocess.Popen[bytes]:
        scratch = self._folder / SCRATCH
        with (self._folder / LOG).open("ab") as errors:
            return subprocess.Popen(
                [grant.python, "-I", str(WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=grant.environment,
                cwd=scratch,
                start_new_session=True,
                close_fds=True,
            )

    def _write_claim(self, pid: int) -> None:
        try:
            write_new(
                self._folder / CLAIM,
                msgspec.json.encode(WorkerClaim(attendant=os.getpid(), worker=pid, born=read_process_identity(pid))),
            )
        except FileExistsError:
            raise LeaseFenced(f"{self._lease} was already claimed") from None

    def _stop_when_unguarded(self) -> None:
        """Wait for the end of the agent, or of its lease, then end the worker, because its memory is unguarded."""
        descriptor = lock_file(self._folder / GUARD, wait=True, shared=True)
        if descriptor is not None:
            os.close(descriptor)
        self.stop()

    def _wait_for_go(self) -> bool:
        """Wait until the agent watches the worker. Return False at a stop, a timeout or the end of the lease."""
        deadline = time.monotonic() + GO_SECONDS
        while (
            not self._stopped.wait(POLL_INTERVAL_SECONDS)
            and time.monotonic() < deadline
            and (self._folder / GRANT).exists()
        ):
            if (self._folder / GO).exists():
                return True
        return False

    def _send_job(self, process: subprocess.Popen[bytes], grant: LeaseGrant) -> None:
        assert process.stdin is not None  # noqa: S101  it was asked for
        with suppress(BrokenPipeError):  # the worker has ended, which its exit event reports
            process.stdin.write(msgspec.json.encode({**grant.job, "size": grant.size}) + b"\n")
            process.stdin.flush()

    def _forward_events(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None  # noqa: S101  it was asked for
        descriptor = os.open(self._folder / EVENTS, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "ab", buffering=0) as events:
            _copy_lines(process.stdout, events)

    def _write_exit(self, code: int) -> None:
        """Write an exit event, unless this process itself ended the worker."""
        if not self._stopped.is_set() and (self._folder / EVENTS).exists():
            with (self._folder / EVENTS).open("ab") as events:
                events.write(msgspec.json.encode({"event": "exit", "code": code}) + b"\n")

    def _kill_worker(self) -> None:
        """Kill the worker's process group.

        The id of the group is not reused, because this process has not waited for its leader.
        """
        process = self._process
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)


def _copy_lines(source: IO[bytes], target: IO[bytes]) -> None:
    while line := source.readline(MAX_LINE_BYTES):
        target.write(line)


def main() -> int:
    """Run the worker of the lease that the command line names, and return its exit code.

    If `WorkerParent.run` raises `LeaseFenced`, print the error and return 1.
    """
    folder, lease, generation = sys.argv[1:]
    try:
        return WorkerParent(Path(folder), lease, int(generation)).run()
    except LeaseFenced as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
