"""Installation, repair and removal of the system service. All checks are made before the first change.

A service consists of the unit's file, the unit loaded by the manager, and the running program. Each may be missing or
outdated after a crash, an update or manual changes. `install` checks all three and does the remaining steps; it is safe
to run again.

A foreign file is never overwritten or removed. Nor is a unit of another user or another state folder, because it serves
another pool. The state folder must belong to the user who runs the service.

A unit that does not start is removed, and the earlier unit is restored. A unit that is written but not loaded has a
marker file next to it. With the marker, the next install finishes an interrupted one, even if file and process look
correct.

Data is never removed: `uninstall` prints its location.
"""

import os
import stat
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from coordinator.service import launchd, systemd
from coordinator.service.plan import WIRED_LABEL, ServicePlan, ServiceState
from coordinator.service.service_manager import ServiceError, ServiceHost, find_account
from host.private_files import sync_descriptor

READY_TIMEOUT_SECONDS = 45.0
"""Maximum wait for the service to run, in seconds."""
STEADY_SECONDS = 3.0
"""Seconds with one process id after which a service counts as running."""
POLL_INTERVAL_SECONDS = 0.25
TAIL_CHARS = 2000


@dataclass(frozen=True, slots=True)
class ExistingUnit:
    """Installed unit of the service (launchd or systemd), written by this program.

    All fields are empty if there is none.
    """

    text: str = ""
    """Content of the unit's file."""
    user: str = ""
    """Account under which the unit runs the service; empty if the unit names none."""
    program: tuple[str, ...] = ()
    """Words of the unit's command line."""

    @property
    def state(self) -> str:
        """State folder that the service uses; empty if the command line names none."""
        return self.program[self.program.index("--state") + 1] if "--state" in self.program[:-1] else ""


def read_existing_unit(host: ServiceHost, file: Path) -> ExistingUnit:
    """Read an existing unit. The result is empty if the file does not exist.

    Raise `ServiceError` if this program did not write the file, or if the file cannot be read.
    """
    try:
        facts = file.lstat()
    except FileNotFoundError:
        return ExistingUnit()
    except OSError as error:
        raise ServiceError(1, f"{file} cannot be read: {error.strerror}") from None
    foreign = f"{file} is not a file of macpool: check it, and move it away if it is not needed"
    if stat.S_ISLNK(facts.st_mode) or not stat.S_ISREG(facts.st_mode) or facts.st_uid not in (0, os.geteuid()):
        raise ServiceError(6, foreign)
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ServiceError(1, f"{file} cannot be read: {error.strerror}") from None
    text = content.decode(errors="replace")
    if host.mac:
        job = launchd.parse_own_job(content)
        if job is None:
            raise ServiceError(6, foreign)
        return ExistingUnit(text, str(job.get("UserName", "")), tuple(job["ProgramArguments"]))
    settings = systemd.parse_own_unit(text)
    if settings is None:
        raise ServiceError(6, foreign)
    return ExistingUnit(text, settings.get("User", ""), systemd.split_command(settings.get("ExecStart", "")))


def check_plan(host: ServiceHost, plan: ServicePlan) -> ExistingUnit:
    """Check whether a plan is allowed, and return the existing unit.

    Raise `ServiceError` if this process is not root, if the user is unknown or root, or if files belong to another
    user. The error is also raised if the existing unit is foreign, or serves another user or state folder.
    """
    if host.uid != 0:
        raise ServiceError(4, "a service of the system is installed by root: run it again with sudo")
    uid, _, _ = find_account(plan.user)
    state = Path(plan.state)
    if state.exists() and state.stat().st_uid != uid:
        raise ServiceError(
            6,
            f"{state} belongs to user {state.stat().st_uid}, and the service would run as "
            f"{plan.user} ({uid}): name that user with --user, or another folder with --state",
        )
    unit = read_existing_unit(host, host.unit)
    if unit.text and unit.user != plan.user:
        raise ServiceError(
            6,
            f"{host.unit} runs the service as {unit.user}, not as {plan.user}: `cluster service "
            "uninstall` it first; its data stays",
        )
    if host.mac and host.logs.exists() and host.logs.stat().st_uid != uid:
        raise ServiceError(
            6,
            f"{host.logs} belongs to user {host.logs.stat().st_uid}, and {plan.user} would write "
            f"there: run `sudo chown -R {plan.user} {host.logs}`",
        )
    if unit.text and unit.state != plan.state:
        raise ServiceError(
            6,
            f"{host.unit} serves another state folder than {plan.state}: `cluster service "
            "uninstall` it first; its data stays",
        )
    return unit


@contextmanager
def _convert_os_errors() -> Generator[None]:
    """Convert `OSError` to `ServiceError`."""
    try:
        yield
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        raise ServiceError(1, f"{place}{error.strerror or error}: repair it, and run the command again") from None


@_convert_os_errors()
def install(
    host: ServiceHost, plan: ServicePlan, *, timeout_seconds: float = READY_TIMEOUT_SECONDS
) -> tuple[list[str], ServiceState]:
    """Carry out the plan, and wait up to `timeout_seconds` until the service runs.

    Return the completed steps (an empty list if nothing was to do) and the state of the service. If the service does
    not start, restore and load the earlier unit, or remove the new one. Raise `ServiceError` if the plan is not
    allowed, or if a step fails.
    """
    before, done = check_plan(host, plan), list[str]()
    wanted, service_state = host.render_unit(plan), host.read_state()
    done += _create_folders(host, plan)
    done += _install_wired_job(host, plan.wired_limit_mb)
    unfinished = _get_auxiliary_path(host.unit, "unfinished")
    if before.text == wanted and service_state.running and not unfinished.exists():
        return done, service_state
    _check_unit(host, wanted)
    if before.text != wanted:
        host.unit.parent.mkdir(parents=True, exist_ok=True)
        unfinished.touch()
        _write_unit(host, host.unit, wanted)
        done.append(f"{'renewed' if before.text else 'wrote'} {host.unit}")
    if host.mac and service_state.loaded:
        host.unload_unit()
        done.append("unloaded the earlier unit")
    try:
        host.load_unit()
        service_state = wait_until_running(host, timeout_seconds)
    except ServiceError as error:
        _restore_unit(host, before)
        raise ServiceError(error.code, f"{error}\n{summarize_output(host)}".rstrip()) from None
    unfinished.unlink(missing_ok=True)
    return [*done, f"loaded and running, process {service_state.pid}"], service_state


def wait_until_running(host: ServiceHost, timeout_seconds: float) -> ServiceState:
    """Wait until the service has run as one process for `STEADY_SECONDS`, or `timeout_seconds / 4` if that is less.

    Return the state of the service. Raise `ServiceError` if this takes longer than `timeout_seconds`, or if the state
    cannot be read.
    """
    pause, began = threading.Event(), time.monotonic()
    since, pid = began, None
    while (now := time.monotonic()) - began < timeout_seconds:
        service_state = host.read_state()
        if not service_state.running or service_state.pid != pid:
            since, pid = now, service_state.pid
        elif now - since >= min(STEADY_SECONDS, timeout_seconds / 4):
            return service_state
        pause.wait(POLL_INTERVAL_SECONDS)
    ended = f"; its last exit: {service_state.last_exit}" if (service_state := host.read_state()).last_exit else ""
    raise ServiceError(7, f"the service does not stay up within {timeout_seconds:.0f} s{ended}")


def summarize_output(host: ServiceHost) -> str:
    """Return the last `TAIL_CHARS` characters of the service's output under launchd; empty if it cannot be read."""
    try:
        return (host.logs / "service.log").read_text(errors="replace")[-TAIL_CHARS:]
    except OSError:
        return ""


def _restore_unit(host: ServiceHost, before: ExistingUnit) -> None:
    """Undo an install that did not start: restore and load the earlier unit, if any."""
    _get_auxiliary_path(host.unit, "unfinished").unlink(missing_ok=True)
    host.unload_unit()
    if before.text:
        _write_unit(host, host.unit, before.text)
        host.load_unit()
    else:
        host.unit.unlink(missing_ok=True)
        host.reload_manager()


def _create_folders(host: ServiceHost, plan: ServicePlan) -> list[str]:
    """Create the folders that launchd writes to before the program starts, owned by the service's user.

    The folders above them that are missing, such as `~/.local`, also belong to that user. With root as owner, other
    programs of the user could not write there.
    """
    uid, gid, _ = find_account(plan.user)
    done: list[str] = []
    for folder in [Path(plan.state), *([host.logs] if host.mac else [])]:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        for path in reversed(missing):
            path.mkdir(mode=0o700)
            if os.geteuid() == 0:
                os.chown(path, uid, gid, follow_symlinks=False)
        done += [f"created {folder}"] if missing else []
    return done


def _install_wired_job(host: ServiceHost, megabytes: int) -> list[str]:
    """Write the job of the wired limit if wanted, and run it once now."""
    if not host.mac or not megabytes:
        return []
    wanted = launchd.render_property_list(launchd.build_wired_job(megabytes))
    if read_existing_unit(host, host.wired_unit).text == wanted:
        return []
    host.unload_unit(WIRED_LABEL)
    _write_unit(host, host.wired_unit, wanted)
    host.run_tool_checked("launchctl", "bootstrap", launchd.DOMAIN, str(host.wired_unit))
    return [f"wrote {host.wired_unit}: {megabytes} MB from now on"]


def _get_auxiliary_path(file: Path, suffix: str) -> Path:
    """Return the name of an auxiliary file next to a unit. Service managers ignore such names."""
    return file.with_name(f".{file.name}.{suffix}")


def _check_unit(host: ServiceHost, text: str) -> None:
    wrong = launchd.find_faults(text.encode()) if host.mac else []
    if wrong:
        raise ServiceError(1, f"the unit is not valid: {'; '.join(wrong)}")


def _write_unit(host: ServiceHost, file: Path, text: str) -> None:
    """Replace a unit atomically: owned by root and readable by all (required by launchd), checked by macOS's linter.

    Raise `ServiceError` if the file cannot be written, or if the linter refuses it.
    """
    beside = _get_auxiliary_path(file, "new")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        beside.unlink(missing_ok=True)  # left by an interrupted install
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as opened:
            opened.write(text)
            opened.flush()
            sync_descriptor(descriptor)
            os.fchmod(descriptor, 0o644)
        if host.mac:
            host.run_tool_checked("plutil", "-lint", str(beside))
        beside.replace(file)
    except OSError as error:
        raise ServiceError(1, f"{file} cannot be written: {error.strerror}") from None


@_convert_os_errors()
def uninstall(host: ServiceHost) -> list[str]:
    """Stop the service and remove its units, but no data. Return the completed steps.

    Raise `ServiceError` if this process is not root, if a unit is foreign, if launchctl or systemctl fails, or if a
    file cannot be removed.
    """
    if host.uid != 0:
        raise ServiceError(4, "a service of the system is removed by root: run it again with sudo")
    done: list[str] = []
    unit = read_existing_unit(host, host.unit)
    if host.read_state().loaded:
        host.unload_unit()
        done.append("stopped and unloaded")
    _get_auxiliary_path(host.unit, "unfinished").unlink(missing_ok=True)
    if unit.text:
        host.unit.unlink()
        host.reload_manager()
        done.append(f"removed {host.unit}")
    if host.mac and read_existing_unit(host, host.wired_unit).text:
        host.unload_unit(WIRED_LABEL)
        host.wired_unit.unlink()
        done.append(f"removed {host.wired_unit}; the limit holds until the next start of the machine")
    return done
