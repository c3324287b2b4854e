"""Checks of this machine's place in a pool: settings, the coordinator, certificates, clocks."""

import errno
import json
import os
import re
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.client.errors import PIN, UNREACHABLE
from coordinator.doctor.finding import Finding, fail, not_here, ok, warn
from coordinator.doctor.host_probe import HostProbe
from wire.identity import OLDEST_PROTOCOL, PROTOCOL

if TYPE_CHECKING:
    from wire.certificate import Certificate

SKEW_WARN_SECONDS, SKEW_FAIL_SECONDS = 5.0, 600.0
"""Differences of the clocks, in seconds, above which the check warns and fails."""
DAY_SECONDS = 86400.0
EXPIRES_SOON_SECONDS = 14 * DAY_SECONDS
"""Remaining validity of a certificate, in seconds, below which the check warns."""
MAX_TAIL_BYTES = 256 * 1024
"""Maximum bytes that the checks read from the end of a log."""
SET_CLOCK = "set the clock: certificates and tokens depend on it (System Settings > Date & Time)"
"""Next step for a wrong clock."""
NO_INSPECTION = "the node's inspection failed or did not answer in time"
NO_CLUSTER = "this machine is in no cluster: `cluster up` creates one, `cluster join` joins one"


def check_settings(here: HostProbe) -> Finding:
    """Check config.toml and the environment as a start would read them.

    Fail if a setting is invalid. Warn if a running process uses another value than config.toml has, or if the settings
    could not be inspected.
    """
    from coordinator.client.config_inspect import inspect_settings, read_running_settings

    inspection = here.read_inspection()
    if inspection is None:
        return warn(NO_INSPECTION, "run `cluster config check`")
    report = inspect_settings(here.state, here.state / "config.toml", here.environ, (), inspection)
    now = read_running_settings(here.session, inspection)
    changed = sum(row["origin"] != "default" for row in now.rows or report.rows)
    text = f"settings that are not the default: {changed}" if changed else "every setting has its default"
    if now.overrides:
        flags = ", ".join(sorted(str(row["key"]) for row in now.overrides))
        text += f"; the running processes have {flags} from flags or their environment"
    if report.faults:
        return fail(
            "; ".join(fault.render() for fault in report.faults[:3]),
            "correct it: `cluster config check` lists all errors",
            wrong=len(report.faults),
        )
    if now.drifts:
        drift, more = now.drifts[0], len(now.drifts) - 1
        differs = f"config.toml has {drift['key']} = {drift['now']}, the running process uses {drift['running']}"
        return warn(
            f"{text}; {differs}" + (f" (and {more} more)" if more else ""),
            "settings are read at the start: run `cluster service restart`, or stop and start it",
            changed=changed,
            drift=len(now.drifts),
        )
    return ok(text, changed=changed)


def check_coordinator(here: HostProbe) -> Finding:
    """Check whether the coordinator answers. Fail otherwise, and mark an answer of another peer as `intercepted`.

    The check uses the endpoint of a known coordinator, or the addresses that the node stored (`assess_dials`). Warn if
    the node's inspection did not answer. The check does not apply to a machine without a cluster.
    """
    inspection = here.read_inspection() if here.has_node else None
    dialled: list[dict[str, Any]] = inspection["dialled"] if inspection else []
    if here.knows_coordinator or here.has_cluster:
        return _check_endpoint(here)
    if not here.has_node:
        return not_here(NO_CLUSTER)
    if inspection is None:
        return warn(NO_INSPECTION, "run `python -m node.inspect.report --state STATE` and read its error")
    if inspection["identity_error"]:
        return fail(inspection["identity_error"], "join again with a token: `cluster join URL --token-file FILE`")
    return assess_dials(dialled)


def _check_endpoint(here: HostProbe) -> Finding:
    if not here.knows_coordinator:
        return fail(f"the coordinator of {here.state} is not running", "`cluster up`, or `cluster service restart`")
    began = time.monotonic()
    answer = here.read_version()
    took = time.monotonic() - began
    if answer.value is not None:
        return ok(f"the coordinator answers, version {answer.value['version']}", seconds=round(took, 4))
    if answer.code == PIN:
        return Finding("fail", answer.problem, "do not continue until the fingerprints are equal", intercepted=True)
    step = {
        UNREACHABLE: "check that it runs and that its address is the same: `cluster up`, or `cluster service restart`",
        4: "the key is wrong or lacks the scope: run `cluster key create NAME --scope admin` there",
    }
    return fail(answer.problem, step.get(answer.code, "check its log: `cluster logs`, or STATE/logs/coordinator.log"))


def assess_dials(dialled: Sequence[dict[str, Any]]) -> Finding:
    """Return the finding for connections to the coordinator's addresses that a node stored.

    `dialled` are the rows of `node.inspect.report`. The finding is ok if a peer proved to be the coordinator, else a
    failure. The failure is `intercepted` if a peer proved to be another process.
    """
    text = "; ".join(f"{dial['address']}: {_describe_dial(dial)}" for dial in dialled) or "no address is stored"
    numbers = {dial["address"]: dial["seconds"] for dial in dialled}
    if any(dial["proven"] for dial in dialled):
        return Finding("ok", text, "", numbers)
    if any(dial["proven"] is False for dial in dialled):
        return Finding(
            "fail",
            f"{text}; the process that answers is not the coordinator that this node joined",
            "another cluster has that address now, or a machine intercepts the connection: check the coordinator, "
            "then run `cluster join HOST:8081`",
            numbers,
            intercepted=True,
        )
    return Finding(
        "fail",
        text,
        "check that the coordinator runs; if its address changed, run `cluster join HOST:8081` (needs no token)",
        numbers,
    )


def _describe_dial(dial: dict[str, Any]) -> str:
    if dial["proven"]:
        return f"{dial['seconds'] * 1000:.1f} ms"
    code = dial["errno"]
    return dial["error"] or (os.strerror(code) if code else "no TLS")


def check_certificates(here: HostProbe) -> Finding:
    """Check the expiry of this machine's certificates and of the certificate that the coordinator presented.

    Warn if one expires within `EXPIRES_SOON_SECONDS`. Fail if one has expired. Unreadable certificates are ignored. The
    check does not apply without a readable one.
    """
    lives = _read_expiries(here)
    if not lives:
        return not_here(NO_CLUSTER)
    now = time.time()
    text = ", ".join(f"{name} {_describe_expiry(end, now)}" for name, end in lives.items())
    numbers = {name: round(end - now) for name, end in lives.items()}
    over = [name for name, end in lives.items() if end <= now]
    if over:
        return fail(
            f"{text}",
            f"{over[0]} has expired: check the clock; if it is right, restart the coordinator, and "
            "join the node again with a token",
            **numbers,
        )
    if min(lives.values()) < now + EXPIRES_SOON_SECONDS:
        return warn(
            text,
            "certificates are renewed after two thirds of their validity: check the log for the cause, and the clock",
            **numbers,
        )
    return ok(text, **numbers)


def _describe_expiry(end: float, now: float) -> str:
    return f"until {datetime.fromtimestamp(end, UTC):%Y-%m-%d}" if end > now else "has expired"


def _read_expiries(here: HostProbe) -> dict[str, float]:
    """Return the expiry of every certificate by the name of its holder, in Unix seconds."""
    expiries = {name: certificate.expires for name, certificate in _read_authority(here).items()}
    inspection = here.read_inspection() if here.has_node else None
    if inspection and inspection["identity"]:
        expiries["node"] = inspection["identity"]["expires"]
        if "authority" not in expiries and inspection["identity"].get("authority_expires"):
            expiries["authority"] = inspection["identity"]["authority_expires"]
        shown = [dial["expires"] for dial in inspection["dialled"] if dial["expires"]]
        expiries |= {"coordinator": min(shown)} if shown else {}
    return expiries


def _read_authority(here: HostProbe) -> "dict[str, Certificate]":
    """Return the readable certificates of the coordinator on this machine, by the name of their holder."""
    found: dict[str, Certificate] = {}
    if here.has_cluster:
        import ssl

        from wire.certificate import read_certificate

        for name in ("authority", "coordinator"):
            with suppress(OSError, ValueError):
                text = (here.state / "authority" / f"{name}.pem").read_text()
                pem = text[text.index("-----BEGIN CERTIFICATE-----") :]
                found[name] = read_certificate(ssl.PEM_cert_to_DER_cert(pem[: pem.index("-----END CERT") + 25]))
    return found


def check_clock(here: HostProbe) -> Finding:
    """Check this machine's clock against the coordinator's.

    The difference comes from the coordinator's API, or from the last link in the node's log. Warn above
    `SKEW_WARN_SECONDS`, and fail above `SKEW_FAIL_SECONDS`. Fail as well if the CA's certificate on this machine is not
    valid yet. The check does not apply without a known difference.
    """
    authority = _read_authority(here).get("authority")
    if authority is not None:
        from wire.certificate import BACKDATED_SECONDS

        skew, created = time.time() - authority.issued, datetime.fromtimestamp(authority.issued, UTC)
        if skew < -BACKDATED_SECONDS:
            text = f"the clock is before the creation of the cluster at {created:%Y-%m-%d %H:%M} UTC"
            return fail(text, SET_CLOCK, skew=round(skew))
    if here.knows_coordinator:
        skew = _measure_clock_difference(here)
        where = "the coordinator's endpoint"
    else:
        skew, where = _read_last_skew(here.state / "logs" / "node.log"), "the last link"
    if skew is None:
        return not_here("no coordinator reported its time; name one with --url")
    text = f"{skew:+.1f} s compared with {where}"
    if abs(skew) > SKEW_FAIL_SECONDS:
        return fail(text, SET_CLOCK, skew=skew)
    if abs(skew) > SKEW_WARN_SECONDS:
        return warn(text, "set the clock automatically (System Settings > Date & Time)", skew=skew)
    return ok(text, skew=skew)


def _measure_clock_difference(here: HostProbe) -> float | None:
    """Return the seconds by which this machine's clock is ahead of the coordinator's, by the coordinator's API.

    Return None without an answer, and for an older version, whose answer has no time.
    """
    began = time.time()
    answer = here.get("/api/v1/version").value
    if answer is None or "time" not in answer:
        return None
    return round((began + time.time()) / 2 - float(answer["time"]), 3)


def _read_last_skew(log: Path) -> float | None:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - MAX_TAIL_BYTES))
            skews = re.findall(rb'"skew": (-?\d+(?:\.\d+)?)', file.read())
    except OSError:
        return None
    return float(skews[-1]) if skews else None


def check_protocol(here: HostProbe) -> Finding:
    """Check that this machine, the coordinator and all nodes have the same version of Macpool. Warn otherwise.

    The check does not apply without a coordinator, or if the coordinator does not report its version.
    """
    from importlib.metadata import version

    ours = version("macpool")
    if not here.knows_coordinator:
        return not_here(f"macpool {ours}, protocol {PROTOCOL}; no coordinator to compare with (--url names one)")
    coordinator_version, nodes = here.read_version(), here.read_nodes()
    if coordinator_version.value is None:
        return not_here(f"macpool {ours}, protocol {PROTOCOL}; the coordinator did not report its version")
    versions = {node["name"]: node["version"] for node in (nodes.value or {}).get("nodes", []) if node["version"]}
    others = sorted({coordinator_version.value["version"], *versions.values()} - {ours})
    text = f"macpool {ours} here, {coordinator_version.value['version']} at the coordinator, protocol {PROTOCOL}"
    if others:
        return warn(
            f"{text}; elsewhere {', '.join(others)}",
            f"protocols {OLDEST_PROTOCOL} to {PROTOCOL} work "
            "together: update the older machines, the coordinator first",
            nodes=len(versions),
        )
    return ok(text, nodes=len(versions))


def check_identity(here: HostProbe) -> Finding:
    """Check that the node's identity was created on this machine. Fail if the identity was copied or cannot be read.

    Warn if the node's inspection did not answer. The check does not apply without a node.
    """
    if not here.has_node:
        return not_here("this machine has not joined as a node")
    inspection = here.read_inspection()
    if inspection is None:
        return warn(NO_INSPECTION, "run `python -m node.inspect.report --state STATE` and read its error")
    if inspection["identity_error"]:
        return fail(
            inspection["identity_error"], "remove the copied folder STATE/node, and join this machine with a new token"
        )
    known = inspection["identity"]
    return ok(f"{known['name']} ({known['node']}) of cluster {known['cluster']}")


def check_video(here: HostProbe) -> Finding:
    """Check that the ports of this Mac's Ray are free. Fail if one is in use, unless this node has ever started Ray.

    The ports may then be in use by this node's own Ray. The check does not apply if video is not enabled, if Ray is not
    installed, or if the node's inspection did not answer.
    """
    from importlib.metadata import PackageNotFoundError, version

    inspection = here.read_inspection()
    if inspection is None or not inspection["video"]["enabled"]:
        return not_here("video is not enabled here" if inspection else NO_INSPECTION)
    try:
        ray = version("ray")
    except PackageNotFoundError:
        return not_here("Ray is not installed: `uv tool install 'macpool[node,video]'` for videos")
    first = int(inspection["video"]["first_port"])
    taken = [port for port in range(first, first + 60) if _is_port_taken(port)]
    ours = here.state / "node" / "video" / "ray"
    text = f"Ray {ray}, ports {first} to {first + 59}"
    if taken and not ours.exists():
        return fail(
            f"{text}: {len(taken)} of them are in use, the first is {taken[0]}",
            "stop the program that listens there, or set other ports in worker.ray_ports",
            taken=len(taken),
        )
    return ok(f"{text}, {len(taken)} in use" if taken else f"{text}, all free", taken=len(taken))


def _is_port_taken(port: int) -> bool:
    with socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            line.bind(("127.0.0.1", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def check_log_errors(here: HostProbe) -> Finding:
    """Check that the logs of coordinator and node have no errors in the last hour. Warn otherwise.

    Only the last `MAX_TAIL_BYTES` bytes of each log are read. A log that cannot be read counts as one without errors.
    """
    folder = here.state / "logs"
    if not folder.is_dir():
        return not_here("there are no logs yet")
    since = datetime.fromtimestamp(time.time() - 3600, UTC).isoformat()
    errors = [error for name in ("coordinator.log", "node.log") for error in _find_errors(folder / name, since)]
    if errors:
        _, last = max(errors, key=lambda error: error[0])
        return warn(
            f"{len(errors)} errors in the last hour, the last: {last}",
            f"read them: grep '\"level\": \"error\"' '{folder}/'*.log",
            errors=len(errors),
        )
    return ok("no errors in the last hour", errors=0)


def _find_errors(file: Path, since: str) -> list[tuple[str, str]]:
    """Return the time and the event of each error in a log since a time in ISO 8601."""
    errors: list[tuple[str, str]] = []
    try:
        with file.open("rb") as opened:
            opened.seek(max(0, file.stat().st_size - MAX_TAIL_BYTES))
            lines = opened.read().splitlines()
    except OSError:
        return errors
    for line in lines:
        with suppress(ValueError, KeyError, TypeError):
            record: Any = json.loads(line)
            if record["level"] in ("error", "critical") and (at := str(record["timestamp"])) >= since:
                errors.append((at, str(record["event"])[:80]))
    return errors
