"""Checks of this machine alone: system, Python, MLX, memory, disk, files, and macOS's treatment of a service.

Checks of macOS settings do not apply to other systems. A check that cannot read its values usually warns.
"""

import os
import platform
import resource
import stat
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from coordinator.doctor import macos_tool_output
from coordinator.doctor.finding import Finding, fail, not_here, ok, warn
from coordinator.doctor.host_probe import HostProbe
from wire.units import GIB, MIB, show_size

NO_POWER_SOURCE = "this system does not report its power source"
ONLY_MACOS = "only on macOS"
FIREWALL = "/usr/libexec/ApplicationFirewall/socketfilterfw"
MIN_MODEL_DISK_BYTES = 20 * GIB
"""Minimum free bytes on a disk of models. With less, the next download may fail, and the check warns."""
MIN_STATE_DISK_BYTES = GIB
"""Minimum free bytes on the disk of the state folder. With less, the check fails."""
MIN_OPEN_FILES = 1024
"""Hard limit of open files below which `check_open_files` warns."""
MAX_PANIC_AGE_DAYS = 30


def check_system(here: HostProbe) -> Finding:
    """Check the version of the operating system. Fail for macOS below `MIN_MACOS_VERSION`. Accept any other system."""
    if not here.mac:
        return ok(f"{platform.system()} {platform.release()}, {platform.machine()}")
    version, build = macos_tool_output.parse_version(here.run_tool("/usr/bin/sw_vers"))
    if not version:
        return warn("the version of macOS cannot be read", "check that `sw_vers` works")
    text = f"macOS {version} ({build})"
    if int(version.split(".")[0]) < macos_tool_output.MIN_MACOS_VERSION:
        return fail(
            text, f"nodes need macOS {macos_tool_output.MIN_MACOS_VERSION} or newer: update macOS", version=version
        )
    return ok(text, version=version)


def check_python(here: HostProbe) -> Finding:
    """Check that the interpreter is native and supported; fail otherwise. Warn about one that belongs to the system."""
    text = f"Python {platform.python_version()}, {platform.machine()}"
    if here.mac and platform.machine() != "arm64":
        translated = here.run_tool("/usr/sbin/sysctl", "-n", "sysctl.proc_translated").strip() == "1"
        return fail(
            text + (", translated by Rosetta" if translated else ""),
            "MLX needs an arm64 Python: `uv python install --managed-python 3.12`, then install macpool with it",
        )
    if not (3, 11) <= sys.version_info[:2] < (3, 15):
        return fail(
            text, "macpool runs on Python 3.11 to 3.14: install it with `uv tool install --python 3.12 macpool`"
        )
    real = os.path.realpath(sys.executable)
    if here.mac and real.startswith(("/usr/bin/", "/Library/Developer/", "/Applications/Xcode")):
        return warn(
            f"{text}, the system's own", "an update of Xcode replaces it: install macpool with `uv tool install`"
        )
    return ok(text)


def check_mlx(here: HostProbe) -> Finding:
    """Check that MLX is installed, can be loaded, and uses Metal on a Mac. Fail otherwise.

    Warn if the process that loads MLX fails or does not end in time. The check does not apply to a machine without MLX
    and without a node.
    """
    device = here.read_device()
    if device is None:
        fix = "run `python -m node.engine.process.device_info` and read its error, or check where it hangs"
        return warn("the process that loads MLX failed or did not answer in time", fix)
    if not device["installed"]:
        if not here.has_node:
            return not_here("MLX is not installed, and this machine is not a node")
        return fail("MLX is not installed", "install the extra: `uv tool install 'macpool[node]'`")
    if device["error"]:
        return fail(f"MLX cannot be loaded: {device['error']}", "reinstall it: `uv tool install --reinstall macpool`")
    text = f"MLX {device['version']} on {device['device']}"
    if here.mac and not device["metal"]:
        return fail(f"{text}: no Metal", "Metal is missing in virtual machines and before the first login: log in once")
    return ok(text, most=device["most"] or None)


def check_wired_limit(here: HostProbe) -> Finding:
    """Check Metal's wired limit. Fail above this machine's highest safe value. Warn if the limit determines the cap."""
    if not here.mac:
        return not_here(ONLY_MACOS)
    inspection = here.read_inspection()
    if inspection is None:
        return warn("the memory cannot be read", "run `python -m node.inspect.report --state STATE` and read its error")
    memory = inspection["memory"]
    text = here.run_tool("/usr/sbin/sysctl", "-n", "iogpu.wired_limit_mb").strip()
    now, safe = int(text) * MIB if text.isdecimal() else None, int(memory["safe"])
    command = f"sudo sysctl iogpu.wired_limit_mb={safe // MIB}"
    keep = (
        f"{command}, then restart the node (until this Mac restarts; `sudo cluster service install "
        f"--wired-limit-mb {safe // MIB}` keeps it)"
    )
    if now is None:
        return warn("iogpu.wired_limit_mb cannot be read", "find its name with `sysctl -a | grep wired_limit`")
    if now > safe:
        return fail(
            f"iogpu.wired_limit_mb is {now // MIB} MB, above the {safe // MIB} MB that leave room for the system",
            f"lower it, or this Mac may panic: {keep}",
            now=now,
            safe=safe,
        )
    limit = f"set to {now // MIB} MB" if now else "the system's default"
    if memory["metal"] is not None:
        source = "as the device reports" if memory["metal_reported"] else "estimated until an engine reports it"
        limit += f", {show_size(memory['metal'])}, {source}"
    if memory.get("bound_by") == "metal":
        return warn(
            f"Metal's limit ({limit}) determines the cap of {show_size(memory['cap'])}",
            f"if this Mac only runs models: {keep}",
            now=now,
            safe=safe,
            cap=memory["cap"],
        )
    return ok(f"Metal's limit is {limit}; highest safe value {safe // MIB} MB", now=now, safe=safe)


def check_memory(here: HostProbe) -> Finding:
    """Check the memory settings. Fail for an invalid cap or margin. Warn if the guard is off, or about another risk."""
    inspection = here.read_inspection()
    if inspection is None:
        return warn("the memory cannot be read", "run `python -m node.inspect.report --state STATE` and read its error")
    memory = inspection["memory"]
    if memory["error"]:
        return fail(memory["error"], "change it in config.toml; `cluster config check` names the line")
    text = (
        f"RAM {show_size(memory['total'])}, cap {show_size(memory['cap'])} (limited by {memory['bound_by']}), "
        f"margin {show_size(memory['margin'])}"
    )
    text += "; a measured model has its own margin" if memory.get("margin_measured") else ""
    numbers = {"total": memory["total"], "cap": memory["cap"], "margin": memory["margin"]}
    if memory["guard"] == "off":
        return warn(f"{text}; the guard is off", 'no request is refused for memory: set memory.guard = "on"', **numbers)
    if memory["warning"]:
        return warn(f"{text}; {memory['warning']}", memory["remedy"], **numbers)
    return ok(text, **numbers)


def check_disk(here: HostProbe) -> Finding:
    """Check the free space on the disks of the model folders and of the state folder.

    Warn below `MIN_MODEL_DISK_BYTES` for models, and if a model folder is missing. Fail below `MIN_STATE_DISK_BYTES`
    for the state folder. If the node's inspection did not answer, only the state folder is checked.
    """
    inspection = here.read_inspection()
    folders = [Path(path) for path in (inspection["folders"] if inspection else ())]
    rows = [(folder, _read_free_disk_bytes(folder), MIN_MODEL_DISK_BYTES) for folder in folders] + [
        (here.state, _read_free_disk_bytes(here.state), MIN_STATE_DISK_BYTES)
    ]
    known = [(folder, free, least) for folder, free, least in rows if free is not None]
    text = ", ".join(dict.fromkeys(f"{show_size(free)} free for {_shorten_path(folder)}" for folder, free, _ in known))
    short = [(folder, free) for folder, free, least in known if free < least]
    numbers = {"free": min((free for _, free, _ in known), default=None)}
    if short:
        worst = min(short, key=lambda entry: (entry[0] != here.state, entry[1]))
        fix = f"free space on the disk of {_shorten_path(worst[0])}, or set another folder in models.folders"
        grade = fail if worst[0] == here.state else warn
        return grade(text, fix, **numbers)
    if inspection and inspection["missing_folders"]:
        missing = _shorten_path(Path(inspection["missing_folders"][0]))
        return warn(
            f"the model folder {missing} is missing", "connect its disk, or remove it from models.folders", **numbers
        )
    return ok(text or "there is no folder yet", **numbers)


def _read_free_disk_bytes(folder: Path) -> int | None:
    """Return the free bytes of a folder's disk, or of its nearest existing parent's; None if unreadable."""
    for place in (folder, *folder.parents):
        try:
            stats = os.statvfs(place)
        except OSError:
            continue
        return stats.f_bavail * stats.f_frsize
    return None


def _shorten_path(path: Path) -> str:
    text, home = str(path), str(Path.home())
    return "~" + text[len(home) :] if home != "/" and text.startswith(home + "/") else text


SECRET_FILES = ("pepper", "run.json", "cluster.db", "token", "identity.json")
"""Names of files that must be private, in addition to keys and certificates."""
MAX_FILES_SEARCHED = 5000
"""Maximum files of the state folder that `check_files` examines."""


def check_files(here: HostProbe) -> Finding:
    """Check that the secret files of the state folder are private and belong to this user. Fail otherwise.

    Root may check the files of another user. The check does not apply without a state folder.
    """
    if not here.state.exists():
        return not_here(f"there is no state folder {_shorten_path(here.state)}")
    secrets = list(_find_secret_files(here.state))
    wrong = [path for path in secrets if _is_readable_by_others(path)]
    foreign = [path for path in (here.state, *secrets) if path.lstat().st_uid != os.geteuid()]
    if foreign and os.geteuid():
        return fail(
            f"{_shorten_path(foreign[0])} belongs to another user",
            f"change its owner: sudo chown -R $(id -un) '{here.state}'",
        )
    if wrong:
        names = ", ".join(_shorten_path(path) for path in wrong[:3])
        return fail(
            f"other users can read {names}" + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""),
            f"chmod -R go-rwx '{here.state}'",
            open=len(wrong),
        )
    return ok(f"{len(secrets)} files with secrets, none readable by other users", secrets=len(secrets))


def _find_secret_files(state: Path) -> Iterator[Path]:
    """Yield the files that must be private, among the first `MAX_FILES_SEARCHED` files, without symbolic links."""
    looked = 0
    for folder, names, files in os.walk(state):
        names[:] = [name for name in names if name not in ("environments", "logs", "videos", "prometheus")]
        for name in files:
            looked += 1
            if looked > MAX_FILES_SEARCHED:
                return
            path = Path(folder, name)
            if (name in SECRET_FILES or (path.suffix in (".pem", ".key") and "trusted" not in path.parts)) and (
                not path.is_symlink()
            ):
                yield path


def _is_readable_by_others(path: Path) -> bool:
    return bool(stat.S_IMODE(path.stat().st_mode) & 0o077)


def check_firewall(here: HostProbe) -> Finding:
    """Check that macOS's application firewall does not block this Python. Fail if it does.

    Warn if the Python of a coordinator has no entry in the firewall, because macOS shows no prompt for a service.
    """
    if not here.mac:
        return not_here(ONLY_MACOS)
    on = macos_tool_output.parse_firewall(here.run_tool(FIREWALL, "--getglobalstate"))
    if on is None:
        return warn("the application firewall cannot be read", f"check `{FIREWALL} --getglobalstate`")
    if not on:
        return ok("the application firewall is off")
    program = os.path.realpath(sys.executable)
    allow = f"sudo {FIREWALL} --add '{program}' --unblockapp '{program}' (again after each update of Python)"
    if macos_tool_output.parse_block_all(here.run_tool(FIREWALL, "--getblockall")):
        return fail(
            "the application firewall blocks all incoming connections",
            f"sudo {FIREWALL} --setblockall off, then {allow}",
        )
    blocked = macos_tool_output.parse_blocked(here.run_tool(FIREWALL, "--listapps"), program)
    if blocked:
        return fail(f"the application firewall blocks {program}", allow)
    if blocked is None and here.has_cluster:
        return warn(
            "the application firewall is on and has no entry for this Python: a service cannot prompt for one", allow
        )
    return ok(
        "the application firewall is on and permits this Python"
        if blocked is False
        else "the application firewall is on; a node only makes outgoing connections and needs no entry"
    )


def check_sleep(here: HostProbe) -> Finding:
    """Check the sleep settings of a Mac that is not a laptop. Warn if it may sleep, or would not wake or restart."""
    if not here.mac:
        return not_here(ONLY_MACOS)
    settings = macos_tool_output.parse_power_settings(here.run_tool("/usr/bin/pmset", "-g"))
    if "sleep" not in settings:
        return warn("the sleep settings cannot be read", "check `pmset -g`")
    text = ", ".join(
        f"{name} {settings[name]}" for name in ("sleep", "womp", "autorestart", "powernap") if name in settings
    )
    if here.get_power().battery is not None:
        return ok(f"{text}; a laptop may sleep: the pool shows it as asleep and uses it again after wake", **settings)
    wanted = [
        f"{name} {value}"
        for name, value in (("sleep", 0), ("womp", 1), ("autorestart", 1))
        if name in settings and settings[name] != value
    ]
    if wanted:
        return warn(text, f"for a dedicated Mac: sudo pmset -a {' '.join(wanted)}", **settings)
    return ok(text, **settings)


def check_power(here: HostProbe) -> Finding:
    """Warn if a Mac is not on mains power, or if the lid of a laptop is closed. Other systems are only reported."""
    now = here.get_power()
    if now.plugged is None:
        return (
            warn("the power supply cannot be read", "check `pmset -g batt`") if here.mac else not_here(NO_POWER_SOURCE)
        )
    text = ("on mains" if now.plugged else "on battery") + ("" if now.battery is None else f", {now.battery:.0f} %")
    if not here.mac:
        return ok(text, battery=now.battery)
    lid = macos_tool_output.parse_lid(here.run_tool("/usr/sbin/ioreg", "-r", "-k", "AppleClamshellState", "-d", "4"))
    text += ", lid closed" if lid else ""
    if not now.plugged or lid:
        return warn(
            text,
            "connect power and open the lid (or connect a display): otherwise this Mac sleeps",
            battery=now.battery,
        )
    return ok(text, battery=now.battery)


def check_filevault(here: HostProbe) -> Finding:
    """Warn if FileVault is on, because a Mac that waits for the password of its disk runs no service."""
    if not here.mac:
        return not_here(ONLY_MACOS)
    on = macos_tool_output.parse_filevault(here.run_tool("/usr/bin/fdesetup", "status"))
    if on is None:
        return warn("FileVault cannot be read", "check `fdesetup status`")
    if on:
        return warn(
            "FileVault is on: after a power cut this Mac waits for a password, and no service runs until then",
            "`sudo fdesetup authrestart` for a planned restart; turn FileVault off on an unattended Mac",
        )
    return ok("FileVault is off: services start without a password")


def check_panics(here: HostProbe) -> Finding:
    """Check for kernel panics in the last `MAX_PANIC_AGE_DAYS` days. Fail if one names the GPU's memory, else warn."""
    if not here.mac:
        return not_here(ONLY_MACOS)
    folder = here.root / "Library" / "Logs" / "DiagnosticReports"
    reports: list[tuple[float, str, str]] = []
    try:
        # unlike iterdir, glob hides that a folder cannot be read
        for file in [file for file in folder.iterdir() if file.suffix == ".panic"] if folder.exists() else ():
            at = file.stat().st_mtime
            if time.time() - at < MAX_PANIC_AGE_DAYS * 86400:
                reports.append((at, file.name, file.read_text(errors="replace")[:200_000]))
    except OSError as error:
        return warn(f"the panic reports cannot be read: {error.strerror}", f"list {folder} with sudo")
    if not reports:
        return ok(f"no kernel panic in {MAX_PANIC_AGE_DAYS} days", panics=0, of_gpu=0)
    ours = [report for report in reports if macos_tool_output.parse_panic(report[2])[1]]
    at, name, text = max(ours or reports)
    date = f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d}"
    newest = f"{name} of {date}: {macos_tool_output.parse_panic(text)[0] or 'no message'}"
    numbers = {"panics": len(reports), "of_gpu": len(ours)}
    if ours:
        return fail(
            f"kernel panics of the GPU's memory in {MAX_PANIC_AGE_DAYS} days: {len(ours)}, the newest {newest}",
            'set memory.wire = "off"; if it happens again, lower memory.cap; update macOS',
            **numbers,
        )
    return warn(
        f"kernel panics in {MAX_PANIC_AGE_DAYS} days: {len(reports)}, the newest {newest}",
        "it does not name the GPU's memory: update macOS, and read the report",
        **numbers,
    )


def check_started_from(here: HostProbe) -> Finding:
    """Check that the program that started this process needs no permission for the local network. Warn otherwise.

    macOS applies the permission of that program to this process.
    """
    if not here.mac:
        return not_here(ONLY_MACOS)
    environ = dict(here.environ)
    app = macos_tool_output.find_responsible_program(environ)
    if macos_tool_output.is_exempt(environ):
        return ok(f"started from {app}, which needs no permission for the local network")
    return warn(
        f"started from {app}, which needs a permission for the local network",
        "run it from Terminal, or install the service: `sudo cluster service install`",
    )


def check_open_files(here: HostProbe) -> Finding:
    """Check that the hard limit of open files and connections is at least `MIN_OPEN_FILES`. Warn otherwise."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = hard if hard != resource.RLIM_INFINITY else 1 << 20
    if most < MIN_OPEN_FILES:
        return warn(
            f"the limit is {most} open files", "each client needs one: raise the hard limit (`ulimit -Hn`)", most=most
        )
    return ok(f"{soft} open files, can be raised to {most}", most=most)
