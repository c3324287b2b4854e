"""Stand-ins for launchctl, plutil and systemctl. A file holds the loaded jobs; the output is that of the real tools.

Their rules are those of launchctl(1) of macOS 14 and 15, and of systemctl(1) of systemd 252. Numbers are exit codes:

`launchctl bootstrap system FILE`: 5 when the job is loaded, or its file is writable for group or world. Also 5 when the
  file has another owner than this user, in place of root. The file has the job's label.
  `bootout`: 3 when the job is not loaded, else 36. It returns before the job has ended: the job is listed for `SLOW`
  more calls of `print`, and stays loaded until then. `print`: 113 when the job is not loaded; else a listing with tabs.
`systemctl show`: also answers for unknown units, with LoadState=not-found. `restart` of such a unit: 5.

A job runs unless the file `broken` is in the same folder. Then the job ends at once with 1. With the file `restarting`,
a running job has another process at each call. With the file `stuck`, a job of launchctl does not end after `bootout`.

A test starts these programs dozens of times. Hence they import only `os`: with json and pathlib, a start takes 46 ms of
CPU, not 20 ms.
"""

import sys
from pathlib import Path

from coordinator.service.service_manager import ServiceHost

LAUNCHCTL = """
import os
SLOW = 1
here = os.path.dirname(__file__)
book, broken, counted = here + "/loaded", os.path.exists(here + "/broken"), here + "/count"
loaded = eval(open(book).read()) if os.path.exists(book) else {}
open(here + "/calls", "a").write("launchctl " + " ".join(sys.argv[1:]) + "\\n")
verb, rest = sys.argv[1], sys.argv[2:]
def fail(code, text):
    sys.stderr.write(text + "\\n")
    sys.exit(code)
def keep():
    open(book, "w").write(repr(loaded))
def restarts():
    return len(open(here + "/calls").readlines()) if os.path.exists(here + "/restarting") else 0
if verb == "enable":
    sys.exit(0)
if verb == "bootstrap":
    import plistlib
    file = os.stat(rest[1])
    if rest[0] != "system" or file.st_uid != os.geteuid() or file.st_mode & 0o022:
        fail(5, "Bootstrap failed: 5: Input/output error")
    job = plistlib.loads(open(rest[1], "rb").read())
    if job["Label"] in loaded:
        fail(5, "Bootstrap failed: 5: Input/output error")
    count = int(open(counted).read()) + 1 if os.path.exists(counted) else 1
    open(counted, "w").write(str(count))
    loaded[job["Label"]] = {"pid": 1000 + count, "path": rest[1]}
    keep()
    sys.exit(0)
label = rest[-1].partition("/")[2]
if label not in loaded:
    fail({"bootout": 3}.get(verb, 113), f'Could not find service "{label}" in domain for system')
if verb == "bootout":
    loaded[label]["ends"] = loaded[label].get("ends", SLOW)
    keep()
    fail(36, "Boot-out failed: 36: Operation now in progress")
elif verb == "print":
    job = loaded[label]
    if "ends" in job:
        job["ends"] -= not os.path.exists(here + "/stuck")
        if job["ends"] < 0:
            del loaded[label]
        keep()
    if label not in loaded:
        fail(113, f'Could not find service "{label}" in domain for system')
    print(f"system/{label} = {{\\n\\tactive count = 1\\n\\tpath = {job['path']}\\n\\ttype = LaunchDaemon")
    print("\\tstate = " + ("SIGTERMed" if "ends" in job else "spawn scheduled" if broken else "running"))
    print("\\n\\tprogram = /x\\n\\targuments = {\\n\\t\\tstate = 1\\n\\t}\\n")
    if broken:
        print("\\truns = 4\\n\\tlast exit code = 1")
    else:
        pid = job["pid"] + restarts()
        print(f"\\truns = 1\\n\\tpid = {pid}\\n\\tlast exit code = (never exited)")
    print("}")
"""
PLUTIL = """
import plistlib
try:
    plistlib.loads(open(sys.argv[2], "rb").read())
except Exception as error:
    print(f"{sys.argv[2]}: {error}")
    sys.exit(1)
print(f"{sys.argv[2]}: OK")
"""
SYSTEMCTL = """
import os
here = os.path.dirname(__file__)
units = os.path.dirname(here) + "/etc/systemd/system"
book, broken = here + "/units", os.path.exists(here + "/broken")
known = eval(open(book).read()) if os.path.exists(book) else {}
open(here + "/calls", "a").write("systemctl " + " ".join(sys.argv[1:]) + "\\n")
words = [word for word in sys.argv[1:] if not word.startswith("-")]
verb, name = words[0], (words[1] if len(words) > 1 else "")
def keep():
    open(book, "w").write(repr(known))
if verb == "daemon-reload":
    files = os.listdir(units) if os.path.isdir(units) else []
    known = {unit: state for unit, state in known.items() if state["pid"] or unit in files}
    for name in files:
        if name.endswith(".service"):
            known.setdefault(name, {"pid": 0, "count": 0})
    keep()
    sys.exit(0)
state = known.get(name)
if verb == "show":
    restarts = len(open(here + "/calls").readlines()) if os.path.exists(here + "/restarting") else 0
    pid = 0 if state is None or broken else state["pid"] + restarts
    print("LoadState=" + ("not-found" if state is None else "loaded"))
    print("ActiveState=" + ("active" if pid else "activating" if broken and state else "inactive"))
    print("SubState=" + ("running" if pid else "auto-restart" if broken and state else "dead"))
    print(f"MainPID={pid}\\nResult={'exit-code' if broken else 'success'}\\nExecMainStatus={1 if broken else 0}")
    print("UnitFileState=enabled\\nNRestarts=0")
    sys.exit(0)
if state is None:
    sys.stderr.write(f"Failed to {verb} unit: Unit file {name} does not exist.\\n")
    sys.exit(5)
if verb == "restart":
    state["count"] += 1
    state["pid"] = 1000 + state["count"]
if verb == "disable" and "--now" in sys.argv:
    state["pid"] = 0
keep()
"""


def manager(root: Path, platform: str, uid: int = 0) -> ServiceHost:
    """Return a system of its own below `root`, whose service manager has no jobs."""
    folder = root / "bin"
    folder.mkdir(exist_ok=True)
    tools = {"tail": "/usr/bin/tail", "journalctl": str(folder / "journalctl")}
    for name, code in (("launchctl", LAUNCHCTL), ("plutil", PLUTIL), ("systemctl", SYSTEMCTL)):
        (folder / name).write_text(f"#!{sys.executable} -IS\nimport sys\n{code}")
        (folder / name).chmod(0o755)
        tools[name] = str(folder / name)
    return ServiceHost(platform, root, tools, uid)


def calls(root: Path) -> list[str]:
    """Return the commands that the stand-ins received, without `print` and `show`."""
    file = root / "bin" / "calls"
    lines = file.read_text().splitlines() if file.exists() else []
    return [line for line in lines if " print " not in line and " show " not in line]
