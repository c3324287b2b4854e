"""Print a read-only report about this machine as a node, as JSON: `python -m node.inspect.report`.

`cluster doctor` and `cluster config` start this program, because the coordinator's package does not import the node's
settings, identity and memory. If a node runs in the state folder, the report uses the settings of that node. Otherwise
the report uses the settings with which a node would start. The report contains no secret. Of the identity, it has only
the public content of the certificate.
"""

import argparse
import json
import os
import socket
import ssl
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from host.private_files import resolve_home
from host.settings_loader import (
    Flat,
    ResolvedSettings,
    SettingsError,
    build_setting_rows,
    find_changed_settings,
    find_invalid_settings,
    from_environment,
    from_pairs,
    from_tree,
)
from node.agent.enrollment import EnrollError, parse_address
from node.agent.identity import IdentityError, NodeIdentity, create_authority_context, load_identity, proves_coordinator
from node.agent.machine_id import compute_machine_id
from node.inspect.running_settings import read_running_settings
from node.memory.cap import MachineBounds, compute_safe_wired_limit, resolve_cap, resolve_margin, with_device
from node.memory.metal_limit import read_metal_device
from node.memory.sensor import open_machine
from node.models.folders import get_hub_folder, use_hub_folder
from node.settings import AUTO, COORDINATOR_SECTIONS, SECTIONS, NodeSettings, check_settings, resolve_settings
from wire.certificate import explain_wrong_clock, read_certificate

DIAL_TIMEOUT_SECONDS = 2.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report as JSON, and return 0. End with exit code 2 for invalid arguments.

    Raise the errors of `report_machine`.
    """
    parser = argparse.ArgumentParser(prog="python -m node.inspect.report", allow_abbrev=False)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--file", type=Path, help="another file than STATE/config.toml")
    parser.add_argument("--set", action="append", default=[], dest="pairs")
    parser.add_argument("--settings-only", action="store_true")
    options = parser.parse_args(arguments)
    file: Path = options.file or options.state / "config.toml"
    report = report_settings(file, os.environ, options.pairs)
    settings, running = report.pop("made"), read_running_settings(options.state / "node", COORDINATOR_SECTIONS)
    report["running"] = None if running is None else report_running(running, file)
    report["unsuitable"] = "" if report["error"] else find_unsuitable_memory(options.state, settings)
    if not options.settings_only:
        settings = settings if running is None else running.value
        use_hub_folder(settings.models.huggingface_cache, os.environ)
        report |= report_machine(options.state, settings)
    print(json.dumps(report, default=str))
    return 0


def report_settings(file: Path, environ: Mapping[str, str], pairs: Sequence[str]) -> dict[str, Any]:
    """Return the settings with which a node would start, as a dictionary.

    They come from the TOML `file`, the variables `environ`, and the `key=value` texts `pairs`. In the result,
    `settings` are rows with origins, `made` is the `NodeSettings`. After an error, `error` has its text, and `faults`
    has the invalid settings, which `settings` leaves out. If the rest is inconsistent, `settings` has the defaults.
    """
    layers: list[tuple[str, Flat]] = []
    try:
        layers.append((str(file), from_tree(tomllib.loads(file.read_text()) if file.exists() else {})))
        layers += [("environment", from_environment(environ)), ("--set", from_pairs(pairs))]
        resolved = resolve_settings(layers, COORDINATOR_SECTIONS)
    except (OSError, ValueError) as error:
        wrong = [
            setting
            for _, flat in layers
            for setting in find_invalid_settings(NodeSettings, flat, COORDINATOR_SECTIONS, check_settings)
        ]
        resolved = _resolve_without(layers, {fault.key for fault in wrong})
        report: dict[str, Any] = {"error": str(error), "faults": [asdict(fault) for fault in wrong]}
    else:
        report = {"error": "", "faults": []}
    return {**report, "settings": list(build_setting_rows(resolved)), "made": resolved.value}


def report_running(now: ResolvedSettings[NodeSettings], file: Path) -> dict[str, Any]:
    """Return the settings of the running node (`settings`), and those that a restart would change (`drift`).

    `now` are the settings of the running node, `file` is the TOML file that a restart would read. `drift` is empty if
    the file cannot be read or is invalid.
    """
    rows = build_setting_rows(now)
    try:
        later = find_changed_settings(
            rows,
            NodeSettings,
            from_tree(tomllib.loads(file.read_text()) if file.exists() else {}),
            COORDINATOR_SECTIONS,
        )
    except (OSError, ValueError):
        later = []  # faults of the file are reported as faults
    return {"settings": rows, "drift": [asdict(setting) for setting in later]}


def _resolve_without(layers: Sequence[tuple[str, Flat]], wrong: set[str]) -> ResolvedSettings[NodeSettings]:
    """Resolve the settings without the wrong ones, or the defaults where the rest is inconsistent."""
    valid = [(origin, {key: flat[key] for key in flat if key not in wrong}) for origin, flat in layers]
    try:
        return resolve_settings(valid, COORDINATOR_SECTIONS)
    except SettingsError:
        return resolve_settings([], COORDINATOR_SECTIONS)


def report_machine(state: Path, settings: NodeSettings) -> dict[str, Any]:
    """Return machine id, hardware, memory limits, engine, model folders and identity as a dictionary.

    `state` is the state folder. Connect to the stored addresses of the coordinator to report whether they answer
    (`dial_coordinator`). Raise `OSError` if macOS does not print the machine id, `ValueError` if
    `engine.scripted.memory` is no size.
    """
    machine = compute_machine_id(settings.node.machine)
    opened = open_machine(settings)
    bounds = opened.read_bounds()
    device = read_metal_device(state / "node", opened.hardware, bounds.wired)
    folders = [str(resolve_home(folder)) for folder in settings.models.folders]
    return {
        "machine": machine,
        "hardware": convert_to_dict(opened.hardware),
        "memory": {**report_memory(settings, with_device(bounds, device)), "metal_reported": device is not None},
        "engine": settings.engine.kind,
        "video": {"enabled": settings.worker.enabled, "first_port": settings.worker.ray_ports},
        "folders": folders + ([str(get_hub_folder(os.environ))] if settings.models.use_huggingface_cache else []),
        "missing_folders": [folder for folder in folders if not os.path.isdir(folder)],
        "sections": sorted(SECTIONS),
        **report_identity(state / "node" / "identity", machine),
    }


def find_unsuitable_memory(state: Path, settings: NodeSettings) -> str:
    """Return why the cap or the margin is impossible on this machine; empty if both are possible or nothing is known.

    `state` is the state folder.
    """
    try:
        opened = open_machine(settings)
        bounds = opened.read_bounds()
    except (OSError, ValueError):
        return ""
    device = read_metal_device(state / "node", opened.hardware, bounds.wired)
    return str(report_memory(settings, with_device(bounds, device))["error"])


def convert_to_dict(struct: Any) -> dict[str, Any]:
    """Return the fields of a msgspec struct as a dictionary, even if the struct is encoded as an array."""
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def report_memory(settings: NodeSettings, bounds: MachineBounds) -> dict[str, Any]:
    """Return the memory limits of the machine, the cap and the margin, all in bytes, and the limiting term of the cap.

    If the settings allow no cap or margin, `error` has the reason, and cap and margin are omitted. `safe` is the
    highest wired limit that leaves the system the reserve of the tier.
    """
    report: dict[str, Any] = {
        "total": bounds.total,
        "metal": bounds.metal,
        "container": bounds.container,
        "safe": compute_safe_wired_limit(settings.memory.tier, bounds.total),
    }
    try:
        cap = resolve_cap(
            settings.memory.cap, settings.memory.tier, bounds, above_metal=settings.memory.allow_above_metal_limit
        )
        margin = resolve_margin(settings.memory.margin, cap.bytes)
    except SettingsError as error:
        return {**report, "error": str(error)}
    return {
        **report,
        "error": "",
        "cap": cap.bytes,
        "bound_by": cap.bound_by,
        "remedy": cap.remedy,
        "warning": cap.warning or margin.warning,
        "margin": margin.bytes,
        "margin_measured": settings.memory.margin == AUTO,
        "guard": settings.memory.guard,
    }


def report_identity(folder: Path, machine: str) -> dict[str, Any]:
    """Return the identity stored in a folder (`identity`) and the results of dialing its addresses (`dialled`).

    `identity` is None if the node has not joined, or cannot use its identity (`identity_error`). `machine` is the
    machine id.
    """
    try:
        known = load_identity(folder, machine)
    except IdentityError as error:
        return {"identity": None, "identity_error": str(error), "dialled": []}
    if known is None:
        return {"identity": None, "identity_error": "", "dialled": []}
    leaf = read_certificate(known.certificate)
    with ThreadPoolExecutor(max(1, len(known.addresses))) as pool:
        waiting = [pool.submit(dial_coordinator, known, address) for address in known.addresses]
        dialled = [dial.result() for dial in waiting]
    return {
        "identity": {
            "node": known.node,
            "name": known.name,
            "cluster": known.cluster,
            "expires": leaf.expires,
            "authority_expires": read_certificate(known.ca).expires,
        },
        "identity_error": "",
        "dialled": dialled,
    }


def dial_coordinator(known: NodeIdentity, address: str) -> dict[str, Any]:
    """Connect to `address` (`host:port`), verify the coordinator by the cluster's CA, and close. No frame is sent.

    Return a dictionary with `address`, `seconds` to connect, `errno` of the connection (0 without an error), and the
    message `error`. `proven` tells whether the certificate is the coordinator's. `expires` is its expiry in Unix
    seconds. Unknown values are None. Errors of the connection are not raised.
    """
    report: dict[str, Any] = {
        "address": address,
        "errno": None,
        "seconds": None,
        "proven": None,
        "error": "",
        "expires": None,
    }
    try:
        where, began = parse_address(address), time.monotonic()
        with socket.create_connection(where, DIAL_TIMEOUT_SECONDS) as line:
            report |= {"errno": 0, "seconds": time.monotonic() - began}
            with create_authority_context(known.ca).wrap_socket(line) as secure:
                der = secure.getpeercert(binary_form=True)
                report |= {
                    "proven": proves_coordinator(secure, known.cluster),
                    "expires": read_certificate(der).expires if der else None,
                }
    except ssl.SSLCertVerificationError as error:
        # outside its validity, the certificate may still be the coordinator's
        clock_hint = explain_wrong_clock(error, time.time())
        report |= {"proven": None if clock_hint else False, "error": f"{error.verify_message}{clock_hint}"}
    except TimeoutError:
        report["error"] = "no answer"
    except OSError as error:
        report |= {"errno": error.errno if report["errno"] is None else 0, "error": error.strerror or str(error)}
    except (EnrollError, UnicodeError) as error:  # UnicodeError: an impossible host name, such as `a..b`
        report["error"] = str(error)
    return report


if __name__ == "__main__":
    sys.exit(main())
