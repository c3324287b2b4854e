"""Check the ctypes definitions against Apple's headers, by C++ static assertions generated from the definitions.

The package `ziglang` has the headers of libSystem and the list of its symbols. Any machine can therefore compile the
assertions about libSystem for `aarch64-macos` (tests/unit/deploy/test_apple_layouts.py). The package has no headers of
IOKit and CoreFoundation. Only a Mac with Xcode's command line tools can compile the assertions about these (the entry
`layouts` of the Mac check).

The assertions cover size and offset of every field that Macpool reads, constants, and number, kind, width and sign of
every argument and result. They cover neither the effect of a call nor the names of sysctls. Of
`proc_reset_footprint_interval`, a call without a public header, only the symbol is known.
"""

import ctypes
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.doctor import macos_tool_output
from deploy.outcome import Outcome, create_outcome, run_tool
from host import iokit
from node.memory import darwin
from wire.link import endpoint

HEADERS = (
    "stddef.h",
    "stdint.h",
    "errno.h",
    "libproc.h",
    "sys/proc.h",
    "sys/proc_info.h",
    "sys/resource.h",
    "sys/socket.h",
    "sys/sysctl.h",
    "mach/mach.h",
    "dispatch/dispatch.h",
    "netinet/in.h",
    "netinet/tcp.h",
)
"""Headers of libSystem that declare the compared structures, constants and calls."""
FRAMEWORK_HEADERS = ("stdint.h", "CoreFoundation/CoreFoundation.h", "IOKit/IOMessage.h", "IOKit/pwr_mgt/IOPMLib.h")
"""Headers of IOKit and CoreFoundation, which only a Mac has."""
UNDECLARED = frozenset({"proc_reset_footprint_interval"})
"""Calls that no public header declares. Apple publishes their header `libproc_internal.h` only as source."""


@dataclass(frozen=True, slots=True)
class Layout:
    """ctypes structure and the structure of Apple's headers with which it is compared."""

    ours: type[ctypes.Structure]
    """Definition of Macpool."""
    theirs: str
    """Apple's name of the structure, in C++."""
    fields: Mapping[str, str]
    """Apple's names of the fields that Macpool reads, by their names in `ours`."""
    end: str
    """C++ expression for the offset in Apple's structure at which `ours` ends."""


LAYOUTS = (
    Layout(
        darwin.RusageV4,
        "struct rusage_info_v4",
        {
            "phys_footprint": "ri_phys_footprint",
            "lifetime_max_phys_footprint": "ri_lifetime_max_phys_footprint",
            "interval_max_phys_footprint": "ri_interval_max_phys_footprint",
        },
        "sizeof(struct rusage_info_v4)",
    ),
    Layout(
        darwin.ProcBsdInfo,
        "struct proc_bsdinfo",
        {"status": "pbi_status", "start_seconds": "pbi_start_tvsec", "start_microseconds": "pbi_start_tvusec"},
        "sizeof(struct proc_bsdinfo)",
    ),
)
"""Structures that Macpool reads."""
CONSTANTS: Mapping[str, int] = {
    "RUSAGE_INFO_V4": darwin.RUSAGE_INFO_V4,
    "PROC_PIDTBSDINFO": darwin.PROC_PIDTBSDINFO,
    "SZOMB": darwin.ZOMBIE,
    **{f"DISPATCH_MEMORYPRESSURE_{word.upper()}": level for level, word in darwin.PRESSURES.items()},
    "IPPROTO_TCP": endpoint.IPPROTO_TCP,
    "TCP_NODELAY": endpoint.TCP_NODELAY,
    "TCP_NOTSENT_LOWAT": endpoint.NOTSENT_LOWAT_MACOS,
    "AF_UNIX": endpoint.AF_UNIX,
    "EHOSTUNREACH": macos_tool_output.NO_ROUTE,
    "ECONNREFUSED": macos_tool_output.REFUSED,
}
"""Values of Macpool by Apple's names, from the headers of libSystem."""
FRAMEWORK_CONSTANTS: Mapping[str, int] = {
    "kIOMessageCanSystemSleep": iokit.CAN_SLEEP,
    "kIOMessageSystemWillSleep": iokit.WILL_SLEEP,
    "kIOMessageSystemHasPoweredOn": iokit.POWERED_ON,
}
"""Values of Macpool by Apple's names, from the headers of IOKit."""
POINTERS: Mapping[Any, str] = {ctypes.c_void_p: "void *", ctypes.c_char_p: "char *"}
"""C++ types of the untyped pointers of ctypes."""
AGREE_TEMPLATE = """
template <class T> struct Plain { using type = T; };
template <class T> struct Plain<const T> { using type = T; };
template <class T> struct Pointer { static constexpr bool is = false; using to = void; };
template <class T> struct Pointer<T *> { static constexpr bool is = true; using to = typename Plain<T>::type; };
template <class T> struct Void { static constexpr bool is = false; };
template <> struct Void<void> { static constexpr bool is = true; };

// A void pointer agrees with every pointer, a number with a number of the same width and sign.
template <class A, class B> struct Agree {
    static constexpr bool value() {
        using P = Pointer<A>;
        using Q = Pointer<B>;
        if constexpr (Void<A>::is || Void<B>::is) return Void<A>::is && Void<B>::is;
        else if constexpr (P::is != Q::is) return false;
        else if constexpr (!P::is) return sizeof(A) == sizeof(B) && (A(-1) < A(0)) == (B(-1) < B(0));
        else if constexpr (Void<typename P::to>::is || Void<typename Q::to>::is) return true;
        else return Agree<typename P::to, typename Q::to>::value();
    }
};
template <class R, class... A, class S, class... B> struct Agree<R(A...), S(B...)> {
    static constexpr bool value() {
        if constexpr (sizeof...(A) != sizeof...(B)) return false;
        else return Agree<R, S>::value() && (Agree<A, B>::value() && ...);
    }
};
"""
"""C++ templates that compare two prototypes: `Agree<A, B>::value()`."""


def find_foreign_functions(holder: object) -> dict[str, Any]:
    """Return the foreign functions of ctypes among the attributes of an object, by symbol."""
    found = [one for one in vars(holder).values() if hasattr(one, "restype") and not isinstance(one, type)]
    return {call.__name__: call for call in found}


def render_system_source(calls: Mapping[str, Any]) -> str:
    """Return C++ source with the assertions about libSystem: layouts, constants, and prototypes of `calls`.

    `calls` are foreign functions by symbol.
    """
    lines = [
        *_render_headers(HEADERS),
        *(line for layout in LAYOUTS for line in _render_layout(layout)),
        *_render_constants(CONSTANTS),
    ]
    return (
        "\n".join([*lines, *render_prototypes({name: one for name, one in calls.items() if name not in UNDECLARED})])
        + "\n"
    )


def render_framework_source(calls: Mapping[str, Any]) -> str:
    """Return C++ source with the assertions about IOKit and CoreFoundation: constants, and prototypes of `calls`.

    `calls` are foreign functions by symbol.
    """
    return (
        "\n".join(
            [*_render_headers(FRAMEWORK_HEADERS), *_render_constants(FRAMEWORK_CONSTANTS), *render_prototypes(calls)]
        )
        + "\n"
    )


def _render_headers(headers: Iterable[str]) -> list[str]:
    return [*(f"#include <{header}>" for header in headers), AGREE_TEMPLATE]


def _render_layout(layout: Layout) -> Iterable[str]:
    name = layout.ours.__name__
    yield _render_assertion(f"{layout.end} == {ctypes.sizeof(layout.ours)}", f"{name}: size")
    for ours in layout.ours.__annotations__:
        if ours.startswith("_"):
            continue
        theirs, field = layout.fields[ours], getattr(layout.ours, ours)
        yield _render_assertion(f"offsetof({layout.theirs}, {theirs}) == {field.offset}", f"{name}.{ours}: offset")
        yield _render_assertion(f"sizeof((({layout.theirs} *)0)->{theirs}) == {field.size}", f"{name}.{ours}: size")


def _render_constants(constants: Mapping[str, int]) -> Iterable[str]:
    return (_render_assertion(f"(unsigned long long)({name}) == {value}ull", name) for name, value in constants.items())


def render_prototypes(calls: Mapping[str, Any]) -> Iterable[str]:
    """Yield one C++ assertion about the prototype of each call. `calls` are foreign functions by symbol."""
    for name, call in calls.items():
        ours = f"{_render_type(call.restype)}({', '.join(map(_render_type, call.argtypes))})"
        yield _render_assertion(f"Agree<{ours}, decltype({name})>::value()", f"{name}: prototype")


def _render_assertion(condition: str, what: str) -> str:
    return f'static_assert({condition}, "{what}");'


def _render_type(ours: Any) -> str:
    """Return a ctypes type as C++."""
    if ours is None:
        return "void"
    if hasattr(ours, "_argtypes_"):
        return f"{_render_type(ours._restype_)} (*)({', '.join(map(_render_type, ours._argtypes_))})"
    if isinstance(ours._type_, type):
        return f"{_render_type(ours._type_)} *"
    if ours in POINTERS:
        return POINTERS[ours]
    return f"{'' if ours(-1).value < 0 else 'u'}int{8 * ctypes.sizeof(ours)}_t"


def check_layouts() -> Outcome:
    """Compile all assertions against the SDK of this Mac. Return the outcome `pass` if they hold.

    Raise `ToolError` if an assertion fails or the compiler is missing. Raise OSError if a framework cannot be loaded,
    and AttributeError if a library lacks a function.
    """
    kit, core = ctypes.CDLL(iokit.IOKIT), ctypes.CDLL(iokit.CORE)
    iokit.declare_functions(kit, core)
    calls, framework_calls = (
        find_foreign_functions(darwin.LibSystem()),
        find_foreign_functions(kit) | find_foreign_functions(core),
    )
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (
            ("system", render_system_source(calls)),
            ("frameworks", render_framework_source(framework_calls)),
        ):
            source = Path(folder) / f"{name}.cpp"
            source.write_text(text)
            run_tool("/usr/bin/xcrun", "clang++", "-std=c++17", "-fsyntax-only", str(source))
    return create_outcome(
        good=True, text=f"{len(LAYOUTS)} structures, {len(calls) + len(framework_calls)} calls as in the SDK"
    )
