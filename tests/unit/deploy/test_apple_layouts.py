"""Compare our ctypes definitions with Apple's headers, which the package ziglang carries, compiled for a Mac
anywhere."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import pytest
import ziglang

from deploy import apple_layouts
from deploy.apple_layouts import (
    LAYOUTS,
    UNDECLARED,
    find_foreign_functions,
    render_framework_source,
    render_system_source,
)
from host import iokit
from node.memory import darwin
from node.memory.darwin import LibSystem

ROOT = Path(__file__).parents[3]
SUPPORT = ROOT / "tests" / "support"
SYMBOLS = Path(ziglang.__file__).parent / "lib" / "libc" / "darwin" / "libSystem.tbd"
ON_LINUX = {"host/heap.py"}
"""Files that use ctypes on Linux alone."""
OF_PYTHON = {"node/engine/text/time_limit.py"}
"""Files that use ctypes for Python's own C API, which is the same on each system."""
FRAMEWORKS = {
    "CoreFoundation/CoreFoundation.h": """
        typedef const struct __CFString *CFStringRef;
        typedef struct __CFRunLoop *CFRunLoopRef;
        typedef struct __CFRunLoopSource *CFRunLoopSourceRef;
        typedef CFStringRef CFRunLoopMode;
        extern "C" CFRunLoopRef CFRunLoopGetCurrent(void);
        extern "C" void CFRunLoopAddSource(CFRunLoopRef rl, CFRunLoopSourceRef source, CFRunLoopMode mode);
        extern "C" void CFRunLoopRun(void);
        extern "C" void CFRunLoopStop(CFRunLoopRef rl);
        """,
    "IOKit/IOMessage.h": """
        #include <mach/error.h>
        #define message(number) ((unsigned)(err_system(0x38) | (number)))
        #define kIOMessageCanSystemSleep message(0x270)
        #define kIOMessageSystemWillSleep message(0x280)
        #define kIOMessageSystemHasPoweredOn message(0x300)
        """,
    "IOKit/pwr_mgt/IOPMLib.h": """
        #include <mach/mach.h>
        typedef struct IONotificationPort *IONotificationPortRef;
        typedef void (*Interest)(void *refcon, mach_port_t service, uint32_t type, void *argument);
        extern "C" mach_port_t IORegisterForSystemPower(void *, IONotificationPortRef *, Interest, mach_port_t *);
        extern "C" int IODeregisterForSystemPower(mach_port_t *notifier);
        extern "C" int IOAllowPowerChange(mach_port_t kernelPort, intptr_t notificationID);
        extern "C" CFRunLoopSourceRef IONotificationPortGetRunLoopSource(IONotificationPortRef notify);
        """,
}
"""Declarations that only a Mac has, from its manual pages and the public sources of IOKitUser: a stand-in for
headers."""

Compile = Callable[..., str]


@pytest.fixture
def compiles(tmp_path: Path) -> Compile:
    """Return a function that compiles a source for a Mac and returns the compiler's errors, empty for none."""

    def compiled(source: str, *flags: str) -> str:
        (tmp_path / "a.cpp").write_text(source)
        command = [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-macos", "-std=c++17", *flags]
        cache = {"ZIG_GLOBAL_CACHE_DIR": str(tmp_path / "zig"), "ZIG_LOCAL_CACHE_DIR": str(tmp_path / "zig")}
        done = subprocess.run(
            [*command, "-c", "a.cpp", "-o", "a.o"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env={**os.environ, **cache},
        )
        assert (done.returncode == 0) == (not re.search(r"\berror:", done.stderr)), done.stderr
        return "\n".join(line for line in done.stderr.splitlines() if "error:" in line)

    return compiled


def standin(folder: Path, name: str) -> str:
    if sys.platform != "linux" or shutil.which("gcc") is None:
        pytest.skip("compiles a stand-in that reads /proc")
    library = folder / f"{name}.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, SUPPORT / f"{name}.c"], check=True)
    return str(library)


@pytest.fixture
def calls(tmp_path: Path) -> dict[str, Any]:
    """Return the calls of libSystem as `LibSystem` declares them."""
    return find_foreign_functions(
        LibSystem() if sys.platform == "darwin" else LibSystem(standin(tmp_path, "libproc_standin"))
    )


def test_layouts_constants_and_calls_of_libsystem_are_apples(
    compiles: Compile, calls: dict[str, Any], record_property: Callable[[str, object], None]
):
    assert len(calls) >= 4
    assert compiles(render_system_source(calls)) == ""
    without = ", ".join(sorted(UNDECLARED))
    seen = f"Apple's headers agree with {len(LAYOUTS)} structures and {len(calls) - len(UNDECLARED)} calls of libSystem"
    record_property("seen", f"{seen}; no header here for {without}, IOKit and CoreFoundation")


def test_every_called_symbol_is_in_libsystem(calls: dict[str, Any]):
    exported = set(re.findall(r"\b_\w+", SYMBOLS.read_text()))
    assert len(exported) > 1000
    assert {name for name in calls if f"_{name}" not in exported} == set()
    assert "_proc_pid_no_such_call" not in exported


def test_every_file_that_uses_ctypes_and_every_structure_is_checked():
    folders = ("coordinator", "host", "node", "router", "simulation", "wire")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    uses = re.compile(r"^\s*(import|from) ctypes\b", re.MULTILINE)
    users = {str(path.relative_to(ROOT)) for path in files if uses.search(path.read_text())}
    assert users == {"node/memory/darwin.py", "host/iokit.py"} | ON_LINUX | OF_PYTHON
    structures = {
        one
        for module in (darwin, iokit)
        for one in vars(module).values()
        if isinstance(one, type) and issubclass(one, ctypes.Structure)
    }
    assert structures == {layout.ours for layout in LAYOUTS}


def test_calls_of_the_frameworks_are_checked_where_their_headers_are(compiles: Compile, tmp_path: Path):
    library = standin(tmp_path, "iokit_standin")
    kit, core = ctypes.CDLL(library), ctypes.CDLL(library)
    iokit.declare_functions(kit, core)
    for name, text in FRAMEWORKS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    calls = find_foreign_functions(kit) | find_foreign_functions(core)
    assert len(calls) == 8
    assert compiles(render_framework_source(calls), "-I.") == ""
    header = tmp_path / "IOKit" / "pwr_mgt" / "IOPMLib.h"
    header.write_text(header.read_text().replace("uint32_t type", "uint64_t type"))
    assert "IORegisterForSystemPower: prototype" in compiles(render_framework_source(calls), "-I.")


class Call:
    """A foreign function as ctypes declares it."""

    def __init__(self, restype: Any, *argtypes: Any) -> None:
        self.restype, self.argtypes = restype, argtypes


APPLES = """
extern "C" int take(int pid, unsigned flavor, void **buffer, const char *name);
extern "C" unsigned give(unsigned long *size, void (*heard)(void *, unsigned));
extern "C" void *make(void);
"""
TAKE = (c_int, c_int, c_uint32, c_void_p, c_char_p)
GIVE = (c_uint32, POINTER(c_size_t), CFUNCTYPE(None, c_void_p, c_uint32))


@pytest.mark.parametrize(
    ("name", "call", "agrees"),
    [
        ("take", Call(*TAKE), True),
        ("give", Call(*GIVE), True),
        ("give", Call(c_uint32, c_void_p, c_void_p), True),
        ("make", Call(c_void_p), True),
        ("take", Call(*TAKE[:-1]), False),
        ("take", Call(*TAKE, c_int), False),
        ("take", Call(c_uint32, *TAKE[1:]), False),
        ("take", Call(None, *TAKE[1:]), False),
        ("take", Call(c_int, c_int64, *TAKE[2:]), False),
        ("take", Call(c_int, c_int, c_int, *TAKE[3:]), False),
        ("take", Call(c_int, c_int, c_uint32, c_uint64, c_char_p), False),
        ("take", Call(c_int, c_int, c_uint32, c_void_p, POINTER(c_int)), False),
        ("give", Call(c_uint32, POINTER(c_uint32), GIVE[2]), False),
        ("give", Call(c_uint32, GIVE[1], CFUNCTYPE(None, c_void_p, c_uint64)), False),
        ("give", Call(c_uint32, GIVE[1], CFUNCTYPE(None, c_void_p)), False),
        ("make", Call(c_int), False),
        ("make", Call(c_void_p, c_void_p), False),
    ],
)
def test_a_prototype_agrees_in_number_kind_width_and_sign(compiles: Compile, name: str, call: Call, agrees: bool):
    lines = [
        "#include <stdint.h>",
        APPLES,
        apple_layouts.AGREE_TEMPLATE,
        *apple_layouts.render_prototypes({name: call}),
    ]
    assert (compiles("\n".join(lines)) == "") is agrees


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ("offsetof(struct rusage_info_v4, ri_phys_footprint) == 72", "RusageV4.phys_footprint: offset"),
        ("sizeof(((struct proc_bsdinfo *)0)->pbi_status) == 4", "ProcBsdInfo.status: size"),
        ("(unsigned long long)(SZOMB) == 5", "SZOMB"),
    ],
)
def test_what_is_wrong_is_named(compiles: Compile, calls: dict[str, Any], changed: str, says: str):
    source = render_system_source(calls)
    assert source.count(changed) == 1
    assert says in compiles(source.replace(changed, f"{changed}1"))
