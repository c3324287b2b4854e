"""Checks of a machine's place in a pool, with a coordinator on loopback, real certificates and logs."""

import errno
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from coordinator.client.api_client import ApiSession
from coordinator.client.errors import PIN, REFUSED, UNREACHABLE
from coordinator.doctor import pool_checks as checks
from coordinator.doctor.finding import Finding
from coordinator.doctor.host_probe import CoordinatorAnswer, HostProbe, ToolOutput
from coordinator.tls.cluster_ca import ClusterCa
from tests.support.pretended_mac import pretended
from wire.identity import OLDEST_PROTOCOL, PROTOCOL

DAY = 86400.0
PEER = {"address": "192.168.1.20:8081", "errno": 0, "seconds": 0.002, "proven": True, "error": "", "expires": None}


def seen(found: Finding) -> tuple[str, str, str]:
    return found.result, found.text, found.fix


def joined(state: Path) -> None:
    (state / "node" / "identity").mkdir(parents=True)
    (state / "node" / "identity" / "identity.json").write_text("{}")


class Answering:
    """A coordinator with answers by path that a test sets; 401 for any other path."""

    def __init__(self, state: Path) -> None:
        self.answers: dict[str, dict[str, Any]] = {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer = outer.answers.get(self.path)
                told = {"error": {"message": "the key is not known", "code": "unauthorized"}}
                body = json.dumps(told if answer is None else answer).encode()
                self.send_response(401 if answer is None else 200)
                self.send_header("content-length", str(len(body)))
                self.send_header("content-type", "application/json")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Suppress the log of requests."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()
        run = state / "run.json"
        run.write_text(json.dumps({"url": f"http://127.0.0.1:{self.server.server_port}", "secret": "mp_x_y"}))
        run.chmod(0o600)

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def answering(tmp_path: Path) -> Iterator[Answering]:
    made = Answering(tmp_path)
    yield made
    made.close()


# the coordinator


def test_a_coordinator_that_answers_is_named_with_its_version(tmp_path: Path, answering: Answering):
    answering.answers["/api/v1/version"] = {"version": "1.2.3"}
    began = time.monotonic()
    found = checks.check_coordinator(pretended(tmp_path))
    assert seen(found) == ("ok", "the coordinator answers, version 1.2.3", "")
    assert 0 < float(found.numbers["seconds"] or 0) <= time.monotonic() - began


def test_a_key_that_is_refused_is_a_failure_with_the_verb_that_makes_one(tmp_path: Path, answering: Answering):
    found = checks.check_coordinator(pretended(tmp_path))
    assert found.result == "fail"
    assert "cluster key create NAME --scope admin" in found.fix


def test_check_coordinator_advises_by_the_kind_of_failure(tmp_path: Path, answering: Answering):
    here = pretended(tmp_path)
    for code, step in (
        (UNREACHABLE, "check that it runs and that its address is the same: `cluster up`"),
        (REFUSED, "check its log: `cluster logs`, or STATE/logs/coordinator.log"),
    ):
        object.__setattr__(here, "read_version", lambda code=code: CoordinatorAnswer(None, code, "it fails"))
        found = checks.check_coordinator(here)
        assert (seen(found)[:2], found.fix.startswith(step)) == (("fail", "it fails"), True)
    assert answering.answers == {}


@pytest.mark.parametrize(("content", "step"), [("{", "delete the file"), ("[]", "delete the file")])
def test_a_damaged_run_file_is_named_and_is_no_fault_of_the_checks(tmp_path: Path, content: str, step: str):
    (tmp_path / "run.json").write_text(content)
    here = pretended(tmp_path)
    found = checks.check_coordinator(here)
    assert found.result == "fail"
    assert (found.text.startswith(str(tmp_path / "run.json")), found.text.endswith(step)) == (True, True), found.text
    assert [check(here).result for check in (checks.check_clock, checks.check_protocol)] == ["not here"] * 2


@pytest.mark.parametrize("node", [False, True])
def test_a_coordinator_that_does_not_run_names_its_state_folder(tmp_path: Path, node: bool):
    (tmp_path / "cluster.db").touch()
    if node:  # a node that the coordinator's machine runs as well
        joined(tmp_path)
    found = checks.check_coordinator(pretended(tmp_path))
    expected = f"the coordinator of {tmp_path} is not running", "`cluster up`, or `cluster service restart`"
    assert seen(found) == ("fail", *expected)


@pytest.mark.parametrize(
    ("dialled", "result", "text", "intercepted"),
    [
        ([PEER], "ok", "192.168.1.20:8081: 2.0 ms", False),
        (
            [{**PEER, "errno": 111, "proven": None}, {**PEER, "address": "b:1"}],
            "ok",
            "192.168.1.20:8081: Connection refused; b:1: 2.0 ms",
            False,
        ),
        ([{**PEER, "errno": 0, "proven": None}], "fail", "192.168.1.20:8081: no TLS", False),
        (
            [{**PEER, "proven": False, "error": "self-signed"}],
            "fail",
            "192.168.1.20:8081: self-signed; the process that answers is not the coordinator that this node joined",
            True,
        ),
        (
            [{**PEER, "errno": 61, "proven": None, "error": "refused"}, {**PEER, "address": "b:1", "proven": False}],
            "fail",
            "192.168.1.20:8081: refused; b:1: no TLS; the process that answers is not the coordinator that this node "
            "joined",
            True,
        ),
        ([], "fail", "no address is stored", False),
    ],
)
def test_check_coordinator_reports_the_peer_at_each_address(
    tmp_path: Path, dialled: list[dict[str, Any]], result: str, text: str, intercepted: bool
):
    joined(tmp_path)
    found = checks.check_coordinator(pretended(tmp_path, dialled=dialled))
    assert (found.result, found.text, found.intercepted) == (result, text, intercepted)
    assert found.numbers == {one["address"]: 0.002 for one in dialled}
    assert ("cluster join HOST:8081" in found.fix) is (result == "fail")


def test_an_identity_that_cannot_be_used_is_named_by_coordinator_and_identity(tmp_path: Path):
    joined(tmp_path)
    here = pretended(tmp_path, identity_error="the identity is of another machine")
    for check in (checks.check_coordinator, checks.check_identity):
        assert check(here).result == "fail"
        assert check(here).text == "the identity is of another machine"
        assert "token" in check(here).fix


def test_the_identity_names_node_and_cluster(tmp_path: Path):
    joined(tmp_path)
    known = {"name": "studio", "node": "n-1", "cluster": "c-1", "expires": 2e9}
    found = checks.check_identity(pretended(tmp_path, identity=known))
    assert seen(found) == ("ok", "studio (n-1) of cluster c-1", "")


def silent(here: HostProbe) -> HostProbe:
    """Return a machine whose own modules give no answer."""

    def ask(command: tuple[str, ...], seconds: float) -> ToolOutput | None:
        return None if command[0] == sys.executable else here.run(command, seconds)

    return HostProbe(
        here.session, here.platform, here.environ, ask, here.dial, here.root, here.get_power, here.timeout_seconds
    )


def test_a_nodes_part_that_does_not_answer_is_a_warning_with_the_command_to_run(tmp_path: Path):
    joined(tmp_path)
    found = {check: check(silent(pretended(tmp_path))) for check in (checks.check_coordinator, checks.check_identity)}
    examine = "run `python -m node.inspect.report --state STATE` and read its error"
    assert {seen(one) for one in found.values()} == {
        ("warn", "the node's inspection failed or did not answer in time", examine)
    }
    found_settings = seen(checks.check_settings(silent(pretended(tmp_path))))
    assert found_settings == (
        "warn",
        "the node's inspection failed or did not answer in time",
        "run `cluster config check`",
    )
    assert seen(checks.check_video(silent(pretended(tmp_path))))[:2] == (
        "not here",
        "the node's inspection failed or did not answer in time",
    )
    assert seen(checks.check_video(pretended(tmp_path)))[:2] == ("not here", "video is not enabled here")


def test_a_coordinator_with_another_certificate_is_intercepted(tmp_path: Path, answering: Answering):
    here = pretended(tmp_path)
    object.__setattr__(here, "read_version", lambda: CoordinatorAnswer(None, PIN, "the fingerprint is another one"))
    found = checks.check_coordinator(here)
    assert seen(found)[:2] == ("fail", "the fingerprint is another one")
    assert found.intercepted


# certificates and clocks


def lives(state: Path, coordinator: float) -> ClusterCa:
    """Make an authority whose coordinator's certificate ends in `coordinator` seconds."""
    (state / "cluster.db").touch()
    whole = 90 * DAY
    return ClusterCa(state / "authority", lambda: time.time() - whole + coordinator)


@pytest.mark.parametrize(
    ("days", "result"), [(60.0, "ok"), (14.1, "ok"), (13.9, "warn"), (0.5, "warn"), (-0.5, "fail")]
)
def test_certificates_that_end_within_14_days_are_a_warning_and_ended_ones_a_failure(
    tmp_path: Path, days: float, result: str
):
    made = lives(tmp_path, days * DAY)
    end = made.validity[1]
    assert abs(end - time.time() - days * DAY) < 2 * DAY / 24, "the test's own arithmetic: lives are 90 days"
    found = checks.check_certificates(pretended(tmp_path))
    assert found.result == result
    assert abs(float(found.numbers["coordinator"] or 0) - (end - time.time())) < 5
    assert float(found.numbers["authority"] or 0) > 300 * DAY
    date = f"{datetime.fromtimestamp(end, UTC):%Y-%m-%d}"
    assert f"coordinator {'has expired' if result == 'fail' else f'until {date}'}" in found.text
    assert ("coordinator has expired: check the clock" in found.fix) is (result == "fail")
    assert ("two thirds of their validity" in found.fix) is (result == "warn")


def test_check_certificates_reads_each_certificate_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = lives(tmp_path, 60 * DAY)
    now = made.validity[0] + 4000 * DAY
    with monkeypatch.context() as patch:
        patch.setattr("time.time", lambda: now)
        found = checks.check_certificates(pretended(tmp_path))
    assert found.result == "fail"
    assert found.fix.startswith("authority has expired: check the clock; if it is right, restart the coordinator")
    for damaged, readable in (("authority", "coordinator"), ("coordinator", None)):
        (tmp_path / "authority" / f"{damaged}.pem").write_text("no certificate")
        found = checks.check_certificates(pretended(tmp_path))
        assert list(found.numbers) == ([readable] if readable else [])


@pytest.mark.parametrize(("ahead", "result"), [(25 * 3600, "fail"), (23 * 3600, "not here"), (-3600, "not here")])
def test_a_clock_before_the_creation_of_the_cluster_is_a_failure(tmp_path: Path, ahead: int, result: str):
    (tmp_path / "cluster.db").touch()
    ClusterCa(tmp_path / "authority", lambda: time.time() + ahead)
    found = checks.check_clock(pretended(tmp_path))
    assert found.result == result
    if result == "fail":
        assert -ahead - 1 <= float(found.numbers["skew"] or 0) <= -ahead + 10
        assert f"{datetime.fromtimestamp(time.time() + ahead, UTC):%Y-%m-%d}" in found.text


def test_check_certificates_of_a_node_uses_own_and_earliest_presented_expiry(tmp_path: Path):
    joined(tmp_path)
    now = time.time()
    shown = [{**PEER, "expires": now + 50 * DAY}, {**PEER, "expires": now + 20 * DAY}, PEER]
    found = checks.check_certificates(pretended(tmp_path, identity={"expires": now + 30 * DAY}, dialled=shown))
    assert found.result == "ok"
    assert {name: round(float(left or 0) / DAY) for name, left in found.numbers.items()} == {
        "node": 30,
        "coordinator": 20,
    }
    lives(tmp_path, 60 * DAY)
    found = checks.check_certificates(pretended(tmp_path, identity={"expires": now + 30 * DAY}, dialled=shown))
    assert round(float(found.numbers["coordinator"] or 0) / DAY) == 20, (
        "the presented certificate expires before the one in the file"
    )
    found = checks.check_certificates(pretended(tmp_path, identity={"expires": now - 1}, dialled=shown))
    assert (found.result, "node has expired" in found.text) == ("fail", True)


@pytest.mark.parametrize(("days", "result"), [(100, "ok"), (13, "warn"), (-1, "fail")])
def test_check_certificates_of_a_node_includes_the_authority(tmp_path: Path, days: int, result: str):
    joined(tmp_path)
    now = time.time()
    identity = {"expires": now + 30 * DAY, "authority_expires": now + days * DAY}
    found = checks.check_certificates(pretended(tmp_path, identity=identity))
    assert found.result == result
    assert {name: round(float(left or 0) / DAY) for name, left in found.numbers.items()} == {
        "node": 30,
        "authority": days,
    }


def test_a_certificate_is_over_at_its_last_second_and_soon_14_days_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    joined(tmp_path)
    now = 2e9
    monkeypatch.setattr("time.time", lambda: now)
    found = [
        checks.check_certificates(pretended(tmp_path, identity={"expires": now + left})) for left in (0, 1, 14 * DAY)
    ]
    assert [(one.result, one.numbers) for one in found] == [
        ("fail", {"node": 0}),
        ("warn", {"node": 1}),
        ("ok", {"node": 14 * DAY}),
    ]
    assert found[0].text == "node has expired"
    assert checks.check_certificates(pretended(tmp_path)).result == "not here", (
        "an identity that cannot be read has none"
    )


@pytest.mark.parametrize(
    ("skew", "result"), [(0.0, "ok"), (4.0, "ok"), (-6.0, "warn"), (590.0, "warn"), (-610.0, "fail"), (610.0, "fail")]
)
def test_the_clock_is_compared_with_the_coordinators(tmp_path: Path, answering: Answering, skew: float, result: str):
    answering.answers["/api/v1/version"] = {"version": "1", "time": time.time() - skew}
    found = checks.check_clock(pretended(tmp_path))
    assert found.result == result
    assert abs(float(found.numbers["skew"] or 0) - skew) < 1.0
    assert found.text == f"{float(found.numbers['skew'] or 0):+.1f} s compared with the coordinator's endpoint"
    assert ("Date & Time" in found.fix) is (result != "ok")


@pytest.mark.parametrize(("skew", "result"), [(5.0, "ok"), (5.1, "warn"), (-600.0, "warn"), (600.1, "fail")])
def test_the_clock_of_the_last_link_is_the_newest_in_the_log(tmp_path: Path, skew: float, result: str):
    (tmp_path / "logs").mkdir()
    lines = [{"event": "linked", "skew": 9999}, {"event": "linked", "skew": skew}, {"event": "report"}]
    (tmp_path / "logs" / "node.log").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = checks.check_clock(pretended(tmp_path))
    assert (found.result, found.numbers) == (result, {"skew": skew})
    assert found.text == f"{skew:+.1f} s compared with the last link"


def test_an_unknown_clock_is_omitted(tmp_path: Path, answering: Answering, monkeypatch: pytest.MonkeyPatch):
    answering.answers["/api/v1/version"] = {"version": "1"}
    assert checks.check_clock(pretended(tmp_path)).result == "not here"
    now = time.time()
    monkeypatch.setattr("time.time", lambda: now)
    answering.answers["/api/v1/version"] = {"version": "1", "time": now - 1.23456}
    assert checks.check_clock(pretended(tmp_path)).numbers == {"skew": 1.235}


class SlowSession(ApiSession):
    """A session whose coordinator takes 3 s to answer, on a clock of the test."""

    now = 2e9

    def request_json(self, method: str, path: str, body: object = None, timeout: float = 30.0) -> dict[str, Any]:
        SlowSession.now += 3.0
        return {"version": "1", "time": self.now - 1.5 - 4.0}


def test_the_time_of_the_answer_is_the_middle_of_the_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("time.time", lambda: SlowSession.now)
    found = checks.check_clock(HostProbe(SlowSession(tmp_path, "http://127.0.0.1:1", None, "text")))
    assert (found.result, found.numbers) == ("ok", {"skew": 4.0})


def test_the_clock_is_looked_for_at_the_end_of_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checks, "MAX_TAIL_BYTES", 100)
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "node.log"
    log.write_text(json.dumps({"skew": 9.0}))
    assert checks.check_clock(pretended(tmp_path)).numbers == {"skew": 9.0}
    log.write_text(json.dumps({"skew": 9.0}) + "x" * 200)
    assert checks.check_clock(pretended(tmp_path)).result == "not here"


# versions


def test_versions_without_a_coordinator_or_its_nodes_are_those_that_are_known(tmp_path: Path, answering: Answering):
    ours = version("macpool")
    answering.answers["/api/v1/version"] = {"version": ours}
    assert checks.check_protocol(pretended(tmp_path)).numbers == {"nodes": 0}
    answering.answers.clear()
    answering.answers["/api/v1/nodes"] = {"nodes": [{"name": "a", "version": "0.0.1"}]}
    text = f"macpool {ours}, protocol {PROTOCOL}; the coordinator did not report its version"
    assert seen(checks.check_protocol(pretended(tmp_path)))[:2] == ("not here", text)
    text = f"macpool {ours}, protocol {PROTOCOL}; no coordinator to compare with (--url names one)"
    assert seen(checks.check_protocol(pretended(tmp_path / "elsewhere")))[:2] == ("not here", text)


def test_versions_that_differ_are_named(tmp_path: Path, answering: Answering):
    ours = version("macpool")
    nodes = [{"name": "a", "version": ours}, {"name": "b", "version": "0.0.1"}, {"name": "c", "version": ""}]
    answering.answers |= {"/api/v1/version": {"version": ours}, "/api/v1/nodes": {"nodes": nodes[:1]}}
    found = checks.check_protocol(pretended(tmp_path))
    expected = f"macpool {ours} here, {ours} at the coordinator, protocol {PROTOCOL}"
    assert (seen(found), found.numbers) == (("ok", expected, ""), {"nodes": 1})
    answering.answers["/api/v1/nodes"] = {"nodes": nodes}
    found = checks.check_protocol(pretended(tmp_path))
    assert (found.result, found.text, found.numbers) == ("warn", f"{expected}; elsewhere 0.0.1", {"nodes": 2})
    step = "work together: update the older machines, the coordinator first"
    assert found.fix == f"protocols {OLDEST_PROTOCOL} to {PROTOCOL} {step}"
    answering.answers |= {"/api/v1/version": {"version": "9.9.9"}, "/api/v1/nodes": {"nodes": []}}
    found = checks.check_protocol(pretended(tmp_path))
    assert (found.result, found.text.endswith("elsewhere 9.9.9")) == ("warn", True)


# settings, logs, ports


def test_a_setting_that_is_wrong_is_named(tmp_path: Path):
    (tmp_path / "config.toml").write_text('[router]\nqueue_timeout_seconds = "soon"\n')
    found = checks.check_settings(pretended(tmp_path))
    assert (found.result, found.numbers) == ("fail", {"wrong": 1})
    assert "router.queue_timeout_seconds" in found.text
    assert "cluster config check" in found.fix
    (tmp_path / "config.toml").unlink()
    environ = {"MACPOOL_ROUTER__QUEUE_TIMEOUT_SECONDS": "later"}
    found = checks.check_settings(pretended(tmp_path, environ=environ))
    assert (found.result, "router.queue_timeout_seconds" in found.text) == ("fail", True)
    assert seen(checks.check_settings(pretended(tmp_path)))[:2] == ("ok", "every setting has its default")


def test_settings_of_the_file_are_counted_and_wrong_ones_named_up_to_three(tmp_path: Path):
    (tmp_path / "config.toml").write_text("[router]\nqueue_timeout_seconds = 7\n")
    found = checks.check_settings(pretended(tmp_path))
    assert (seen(found), found.numbers) == (("ok", "settings that are not the default: 1", ""), {"changed": 1})
    (tmp_path / "config.toml").write_text("[router]\n" + "".join(f"wrong{number} = 1\n" for number in range(4)))
    found = checks.check_settings(pretended(tmp_path))
    assert (found.result, found.numbers, found.text.count("router.wrong")) == ("fail", {"wrong": 4}, 3)


@pytest.mark.parametrize(("differing", "more"), [(1, ""), (2, " (and 1 more)"), (3, " (and 2 more)")])
def test_check_settings_counts_differences_from_the_running_process(tmp_path: Path, differing: int, more: str):
    drift = [{"key": f"node.x{number}", "running": "a", "now": "b"} for number in range(differing)]
    rows = [{"key": key, "value": "", "origin": "--set"} for key in ("sharing.when", "memory.cap")]
    found = checks.check_settings(pretended(tmp_path, running={"settings": rows, "drift": drift}))
    assert (found.result, found.numbers) == ("warn", {"changed": 2, "drift": differing})
    assert "the running processes have memory.cap, sharing.when from flags or their environment; " in found.text
    assert found.text.endswith(f"config.toml has node.x0 = b, the running process uses a{more}")


def test_logs_that_there_are_not_have_no_errors(tmp_path: Path):
    assert seen(checks.check_log_errors(pretended(tmp_path)))[:2] == ("not here", "there are no logs yet")


def test_the_end_of_a_long_log_is_looked_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checks, "MAX_TAIL_BYTES", 1000)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "node.log").write_text(event(10) * 100 + event(10, name="e" * 100))
    found = checks.check_log_errors(pretended(tmp_path))
    assert found.text.endswith(f"the last: {'e' * 80}")
    assert 5 < int(found.numbers["errors"] or 0) < 20


def test_a_quarter_of_a_mebibyte_of_a_log_is_looked_through(tmp_path: Path):
    (tmp_path / "logs").mkdir()
    line = event(10)
    (tmp_path / "logs" / "node.log").write_text(line * (2**18 // len(line) + 50))
    assert checks.check_log_errors(pretended(tmp_path)).numbers == {"errors": 2**18 // len(line)}


def event(seconds_ago: float, level: str = "error", name: str = "denied") -> str:
    at = datetime.fromtimestamp(time.time() - seconds_ago, UTC).isoformat()
    return json.dumps({"event": name, "level": level, "timestamp": at}) + "\n"


def test_errors_are_counted_by_utc_in_every_time_zone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "node.log").write_text(event(3700) + event(3500))
    for zone in ("America/Los_Angeles", "Asia/Tokyo"):
        with monkeypatch.context() as patch:
            patch.setenv("TZ", zone)
            time.tzset()
            found = checks.check_log_errors(pretended(tmp_path))
        time.tzset()
        assert found.numbers == {"errors": 1}, zone


def test_the_last_error_of_both_logs_is_named(tmp_path: Path):
    (tmp_path / "logs").mkdir()
    for log, seconds_ago in (("coordinator", 10), ("node", 20)):
        (tmp_path / "logs" / f"{log}.log").write_text(event(30, name="old") + event(seconds_ago, name=log))
    found = checks.check_log_errors(pretended(tmp_path))
    assert found.text == "4 errors in the last hour, the last: coordinator"


@pytest.mark.parametrize(
    ("lines", "result", "count"),
    [
        (lambda: event(10), "warn", 1),
        (lambda: event(3500) + event(10, "critical"), "warn", 2),
        (lambda: event(3700), "ok", 0),
        (lambda: event(10, "warning") + event(10, "info") + "no json\n[]\n", "ok", 0),
    ],
    ids=["one", "two", "older", "no errors"],
)
@pytest.mark.parametrize("file", ["coordinator.log", "node.log"])
def test_errors_of_the_last_hour_in_either_log_are_counted(
    tmp_path: Path, file: str, lines: Callable[[], str], result: str, count: int
):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / file).write_text(lines())
    found = checks.check_log_errors(pretended(tmp_path))
    assert (found.result, found.numbers) == (result, {"errors": count})
    if count:
        assert found.text == f"{count} errors in the last hour, the last: denied"
        assert f"'{tmp_path / 'logs'}/'*.log" in found.fix


@pytest.fixture
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a distribution called ray first on the path, because only its version is read."""
    folder = tmp_path / "site" / "ray-9.9.9.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: ray\nVersion: 9.9.9\n")
    monkeypatch.setattr("sys.path", [str(tmp_path / "site"), *sys.path])


@pytest.mark.usefixtures("ray")
def test_taken_ports_of_ray_are_a_failure_unless_our_own_ray_runs(tmp_path: Path):
    assert checks.check_video(pretended(tmp_path)).result == "not here"
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        first = int(held.getsockname()[1]) - 59
        here = pretended(tmp_path, video={"enabled": True, "first_port": first})
        found = checks.check_video(here)
        assert found.result == "fail"
        assert found.text.startswith(f"Ray 9.9.9, ports {first} to {first + 59}: ")
        assert int(found.numbers["taken"] or 0) >= 1
        assert "worker.ray_ports" in found.fix
        (tmp_path / "node" / "video" / "ray").mkdir(parents=True)
        ours = checks.check_video(here)
        assert (ours.result, ours.text) == ("ok", f"{found.text.partition(': ')[0]}, {ours.numbers['taken']} in use")


@pytest.mark.usefixtures("ray")
def test_free_ports_of_ray_are_no_fault(tmp_path: Path):
    first = free_range(60)
    here = pretended(tmp_path, video={"enabled": True, "first_port": first})
    with (
        socket.create_server(("127.0.0.1", first + 3)) as server,
        socket.create_connection(server.getsockname()) as end,
    ):
        server.accept()[0].close()  # the port is then in TIME_WAIT
        end.recv(1)
    found = checks.check_video(here)
    assert (found.result, found.text.endswith(", all free"), found.numbers) == ("ok", True, {"taken": 0})
    with ExitStack() as held:
        for port in (first + 4, first + 9, first + 59):
            held.enter_context(socket.create_server(("127.0.0.1", port)))
        found = checks.check_video(here)
    assert (found.result, found.numbers) == ("fail", {"taken": 3})
    assert found.text.endswith(f": 3 of them are in use, the first is {first + 4}")


@pytest.mark.usefixtures("ray")
def test_a_port_that_this_user_may_not_use_is_not_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Denied(socket.socket):
        def bind(self, address: object) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("socket.socket", Denied)
    found = checks.check_video(pretended(tmp_path, video={"enabled": True, "first_port": 1}))
    assert (found.result, found.numbers) == ("ok", {"taken": 0})


def test_without_ray_its_ports_are_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    found = checks.check_video(pretended(tmp_path, video={"enabled": True, "first_port": 6480}))
    assert (found.result, found.text.startswith("Ray is not installed")) == ("not here", True)


def free_range(count: int) -> int:
    """Return the first port of a free range of `count` ports, below those that the system assigns."""
    for first in range(20_000, 30_000, count):
        with ExitStack() as held:
            try:
                for port in range(first, first + count):
                    line = held.enter_context(socket.socket())
                    line.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    line.bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise AssertionError("no range of ports is free")
