"""The service as a launchd job, and parsing of launchctl's output. No I/O.

Not verified on macOS: see `service` in docs/macos-checklist.md.

The job is a LaunchDaemon, not an agent: daemons need no permission for the local network (TN3179) and run before any
login. The job runs as an ordinary user. ProcessType is Interactive, because Standard and Background throttle CPU and
disk.

In the environment, launchd accepts only strings, and expands neither ~ nor variables. It does not rotate a job's
output. The processes therefore truncate that file (`host.log_setup`). There is no caffeinate around the program,
because launchd would then supervise caffeinate.
"""

import plistlib
import re
from typing import Any, cast

from coordinator.service.plan import (
    LABEL,
    MAX_OPEN_FILES,
    MODULE,
    STOP_TIMEOUT_SECONDS,
    THROTTLE_SECONDS,
    WIRED_LABEL,
    ServicePlan,
    ServiceState,
)

FOLDER = "Library/LaunchDaemons"
"""Folder of the jobs, relative to the root."""
LOGS = "/Library/Logs/macpool"
"""Folder of the service's output. It must be on the startup volume, because launchd opens no log on another volume."""
DOMAIN = "system"
"""launchd's domain for jobs of the system."""
NOT_LOADED = frozenset({113, 3})
"""Exit codes of launchctl for a job that is not loaded."""
IN_PROGRESS = 36
"""Exit code of `launchctl bootout` for a job that has not ended yet."""
KEY_TYPES: dict[str, type | tuple[type, ...]] = {
    "Label": str,
    "ProgramArguments": list,
    "UserName": str,
    "GroupName": str,
    "RunAtLoad": bool,
    "KeepAlive": (dict, bool),
    "ThrottleInterval": int,
    "ExitTimeOut": int,
    "ProcessType": str,
    "WorkingDirectory": str,
    "Umask": int,
    "StandardOutPath": str,
    "StandardErrorPath": str,
    "EnvironmentVariables": dict,
    "SoftResourceLimits": dict,
    "HardResourceLimits": dict,
    "LaunchOnlyOnce": bool,
}
"""Keys of launchd.plist(5) that this program uses, with their types."""
SYSCTL = "/usr/sbin/sysctl"
PROCESS_TYPES = frozenset({"Adaptive", "Background", "Interactive", "Standard"})


def build_job(plan: ServicePlan) -> dict[str, Any]:
    """Return the property list of the launchd job that runs the planned service."""
    log = f"{plan.logs}/service.log"
    return {
        "Label": LABEL,
        "ProgramArguments": list(plan.program),
        "UserName": plan.user,
        "GroupName": plan.group,
        "WorkingDirectory": plan.home,
        "EnvironmentVariables": plan.environment,
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": THROTTLE_SECONDS,
        "ExitTimeOut": STOP_TIMEOUT_SECONDS,
        "ProcessType": "Interactive",
        "Umask": 0o077,
        "SoftResourceLimits": {"NumberOfFiles": MAX_OPEN_FILES},
        "HardResourceLimits": {"NumberOfFiles": MAX_OPEN_FILES},
        "StandardOutPath": log,
        "StandardErrorPath": log,
    }


def build_wired_job(megabytes: int) -> dict[str, Any]:
    """Return the property list of the job that sets Metal's wired limit (in MiB) at each boot.

    The job is necessary because macOS does not keep the limit across a reboot.
    """
    return {
        "Label": WIRED_LABEL,
        "ProgramArguments": [SYSCTL, f"iogpu.wired_limit_mb={megabytes}"],
        "RunAtLoad": True,
        "LaunchOnlyOnce": True,
    }


def render_property_list(properties: dict[str, Any]) -> str:
    """Return a property list as XML text."""
    return plistlib.dumps(properties, sort_keys=False).decode()


def find_faults(content: bytes) -> list[str]:
    """Return the faults of a property list that launchd would refuse or silently ignore; an empty list if valid.

    First, unknown keys and wrong types are reported. Without such faults, the values are checked. Faults are then
    missing keys, relative paths, words and variables that are not strings, variables that launchd does not expand, and
    unknown process types.
    """
    properties = _parse_property_list(content)
    if properties is None:
        return ["not a property list with a dictionary"]
    faults: list[str] = []
    for key, value in properties.items():
        kind = KEY_TYPES.get(key)
        if kind is None:
            faults.append(f"unknown key {key}")
        elif not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            faults.append(f"{key} has the wrong type")
    return faults or _find_value_faults(properties)


def _parse_property_list(content: bytes) -> dict[str, Any] | None:
    """Parse a property list. Return None if the data is not a property list with a dictionary."""
    try:
        parsed: object = plistlib.loads(content)
    except Exception:  # a damaged file causes arbitrary parser errors, such as expat's or IndexError
        return None
    return cast("dict[str, Any]", parsed) if isinstance(parsed, dict) else None


def _find_value_faults(properties: dict[str, Any]) -> list[str]:
    faults = [f"{key} is missing" for key in ("Label", "ProgramArguments") if key not in properties]
    program = properties.get("ProgramArguments") or [""]
    paths = [
        program[0],
        *(properties[key] for key in ("WorkingDirectory", "StandardOutPath", "StandardErrorPath") if key in properties),
    ]
    faults += [f"{path!r} is not absolute" for path in paths if not str(path).startswith("/")]
    faults += [f"{word!r} is not a string" for word in program if not isinstance(word, str)]
    variables = properties.get("EnvironmentVariables", {})
    faults += [f"{name} is not a string" for name, value in variables.items() if not isinstance(value, str)]
    faults += [
        f"{name} would not be expanded" for name, value in variables.items() if str(value).startswith(("~", "$"))
    ]
    if properties.get("ProcessType", "Standard") not in PROCESS_TYPES:
        faults.append(f"there is no ProcessType {properties['ProcessType']}")
    return faults


def parse_own_job(content: bytes) -> dict[str, Any] | None:
    """Return the property list in the content of a job's file; None if this program did not write the file."""
    job = _parse_property_list(content)
    if job is None or job.get("Label") not in (LABEL, WIRED_LABEL):
        return None
    program: object = job.get("ProgramArguments")
    return job if isinstance(program, list) and (MODULE in program or SYSCTL in program) else None


def parse_state(code: int, listing: str) -> ServiceState:
    """Parse exit code and output of `launchctl print system/LABEL`. A code other than 0 means that no job is loaded."""
    if code != 0:
        return ServiceState()
    fields = dict(
        re.findall(r"^\t(state|pid|last exit code|last terminating signal|runs) = (.+)$", listing, re.MULTILINE)
    )
    pid = fields.get("pid", "")
    ended = fields.get("last terminating signal") or fields.get("last exit code", "")
    return ServiceState(
        True,
        fields.get("state") == "running" and pid.isdecimal(),
        int(pid) if pid.isdecimal() else None,
        "" if ended == "(never exited)" else ended,
        fields,
    )
