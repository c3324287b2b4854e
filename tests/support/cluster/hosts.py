"""Isolated hosts on one Linux machine: each has its own network, process, mount, name and IPC namespaces.

A veth pair leads from every host to one bridge in a namespace of its own. The machine's interfaces are never changed.
`cut` takes a port off the bridge without a signal to either side. `power_off` does the same and then kills the first
process of the host; the kernel ends the rest, without a goodbye. Hosts need root: `unsupported` returns the reason why
they cannot be made.
"""

import ctypes
import getpass
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

NET = "10.77.0"
CLONE_NEWNET = 0x40000000
"""From linux/sched.h; Python has the name from 3.12 on."""
BOOT = (
    "mount --make-rprivate / && mount --bind {shared} /mnt && mount -t tmpfs tmpfs /dev/shm && mkdir -p {shared} && "
    "mount --move /mnt {shared} && hostname {host} && ip link set lo up && "
    "trap '' CHLD && echo up > {ready} && exec tail -f /dev/null"
)
"""Start of a host with a /dev/shm of its own, in which the folder of the tests may be."""


def run(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a system command; raise RuntimeError with its error output if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done


def _find_shared(folder: Path) -> Path:
    """Return pytest's temporary folder if that is in /dev/shm (Makefile), else the `folder` of the host.

    A host sees this folder although it has a /dev/shm of its own."""
    root = os.environ.get("PYTEST_DEBUG_TEMPROOT", "")
    return Path(root, f"pytest-of-{getpass.getuser()}") if root.startswith("/dev/shm") else folder


def unsupported() -> str:
    """Return why hosts cannot be made here; empty when they can."""
    if sys.platform != "linux":
        return "hosts need Linux network namespaces"
    if os.geteuid() != 0:
        return "hosts need root"
    missing = [tool for tool in ("ip", "nsenter", "unshare") if not shutil.which(tool)]
    if missing:
        return f"hosts need {', '.join(missing)}"
    name = f"mp-probe-{os.getpid()}"
    try:
        run("ip", "netns", "add", name)
        run("ip", "-n", name, "link", "add", "b0", "type", "bridge")
        run("ip", "-n", name, "link", "add", "v0", "type", "veth", "peer", "name", "v1")
    except RuntimeError as error:
        return f"hosts need network namespaces: {error}"
    finally:
        run("ip", "netns", "del", name, check=False)
    return ""


@dataclass(slots=True)
class Host:
    """One host. `init` is the pid of its first process in the outer namespace, 0 when the host is off."""

    name: str
    number: int
    namespace: str
    ip: str
    folder: Path
    init: int = 0
    outer: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def enter(self) -> list[str]:
        """Return the words that run a command in the namespaces of this host."""
        assert self.init, f"{self.name} is off"
        return ["nsenter", "-t", str(self.init), "-n", "-m", "-u", "-i", "-p", f"--wdns={self.folder}", "--"]

    def threads(self, count: int = 1) -> ThreadPoolExecutor:
        """Return a thread pool of this process whose sockets are in the host's network: a client on that host."""
        return ThreadPoolExecutor(count, initializer=_enter_network, initargs=(self.namespace,))

    def pids(self) -> list[int]:
        """Return the pids of the host's processes in the outer namespace, without the first process."""
        wanted = os.readlink(f"/proc/{self.init}/ns/pid")
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) != self.init:
                try:
                    if os.readlink(entry / "ns/pid") == wanted:
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found


def _enter_network(namespace: str) -> None:
    """Move only the calling thread into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(descriptor, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(descriptor)


class Hosts:
    """A bridge and `count` hosts with the addresses from 10.77.0.1 on. A context manager."""

    def __init__(self, folder: Path, count: int = 3) -> None:
        self._folder = folder
        self._count = count
        self._prefix = f"mp{os.getpid() % 100_000}"
        self._switch = f"{self._prefix}-sw"
        self._stack = ExitStack()
        self.hosts: list[Host] = []

    def __enter__(self) -> "Hosts":
        try:
            run("ip", "netns", "add", self._switch)
            self._stack.callback(run, "ip", "netns", "del", self._switch, check=False)
            self._ip(self._switch, "link", "set", "lo", "up")
            # snooping off: without a querier some multicast would be pruned after a while
            self._ip(self._switch, "link", "add", "br0", "type", "bridge", "mcast_snooping", "0", "forward_delay", "0")
            self._ip(self._switch, "addr", "add", f"{NET}.254/24", "dev", "br0")
            self._ip(self._switch, "link", "set", "br0", "up")
            for number in range(1, self._count + 1):
                self._make(number)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __getitem__(self, number: int) -> Host:
        return self.hosts[number - 1]

    def _ip(self, namespace: str, *words: str, check: bool = True) -> None:
        run("ip", "-n", namespace, *words, check=check)

    def _make(self, number: int) -> None:
        namespace = f"{self._prefix}-h{number}"
        run("ip", "netns", "add", namespace)
        self._stack.callback(run, "ip", "netns", "del", namespace, check=False)
        folder = self._folder / f"h{number}"
        folder.mkdir(parents=True)
        host = Host(f"h{number}", number, namespace, f"{NET}.{number}", folder)
        self.hosts.append(host)
        self._ip(namespace, "link", "set", "lo", "up")
        self._ip(namespace, "link", "add", "eth0", "type", "veth", "peer", "name", host.name, "netns", self._switch)
        self._ip(self._switch, "link", "set", host.name, "up")
        self.address(host, host.ip)
        self._ip(namespace, "link", "set", "eth0", "up")
        self._ip(namespace, "route", "add", "default", "via", f"{NET}.254")
        self.boot(host)
        self._stack.callback(self.power_off, host)

    def address(self, host: Host, ip: str) -> None:
        """Replace the addresses of a host with this one."""
        self._ip(host.namespace, "addr", "flush", "dev", "eth0")
        self._ip(host.namespace, "addr", "add", f"{ip}/24", "brd", "+", "dev", "eth0")
        self._ip(host.namespace, "route", "replace", "default", "via", f"{NET}.254", check=False)
        host.ip = ip

    def add_unreachable(self, host: Host, ip: str) -> None:
        """Add an address to a host, on a network that no other host is connected to, such as a cable to a NAS."""
        self._ip(host.namespace, "link", "add", "eth1", "type", "veth", "peer", "name", "nas")
        self._ip(host.namespace, "addr", "add", f"{ip}/24", "brd", "+", "dev", "eth1")
        for end in ("eth1", "nas"):
            self._ip(host.namespace, "link", "set", end, "up")

    def boot(self, host: Host) -> None:
        """Connect the host's cable and start its first process."""
        self.restore(host)
        ready = host.folder / "ready"
        ready.unlink(missing_ok=True)
        outer = subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                host.namespace,
                "unshare",
                "--mount",
                "--uts",
                "--ipc",
                "--pid",
                "--fork",
                "--kill-child",
                "--mount-proc",
                "sh",
                "-c",
                BOOT.format(host=host.name, ready=ready, shared=_find_shared(host.folder)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + 10
        while not ready.exists():
            if outer.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{host.name} did not boot")
            time.sleep(0.01)
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
        host.init, host.outer = int(children[0]), outer

    def power_off(self, host: Host) -> None:
        """End every process of a host at one instant. Its cable is cut first, and therefore no FIN or RST leaves."""
        if not host.init:
            return
        self.cut(host)
        os.kill(host.init, signal.SIGKILL)
        assert host.outer is not None
        host.outer.wait(10)
        host.init = 0

    def cut(self, host: Host) -> None:
        """Drop everything that a host sends or receives, without an error."""
        self._ip(self._switch, "link", "set", host.name, "nomaster", check=False)

    def restore(self, host: Host) -> None:
        """Undo `cut`."""
        self._ip(self._switch, "link", "set", host.name, "master", "br0")

    def block_multicast(self) -> None:
        """Block multicast between hosts, as many access points do. Broadcasts (ARP) still pass."""
        for host in self.hosts:
            self._ip(self._switch, "link", "set", host.name, "type", "bridge_slave", "mcast_flood", "off")

    def shape(self, host: Host, rate: str) -> None:
        """Limit the rate at which a host sends, e.g. "100mbit"."""
        limit = ("root", "tbf", "rate", rate, "burst", "64kb", "latency", "50ms")
        for namespace, device in ((host.namespace, "eth0"), (self._switch, host.name)):
            run("tc", "-n", namespace, "qdisc", "replace", "dev", device, *limit)
