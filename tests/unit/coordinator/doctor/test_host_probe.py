"""Access of the doctor to tools, sockets, child processes and the coordinator's API: failures are values."""

import errno
import json
import socket
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest

from coordinator.client.api_client import ApiSession
from coordinator.client.errors import DENIED, CommandError
from coordinator.doctor import network_checks
from coordinator.doctor.host_probe import (
    ANSWER_TIMEOUT_SECONDS,
    CHILD_MARGIN_SECONDS,
    DIAL_TIMEOUT_SECONDS,
    TOOL_TIMEOUT_SECONDS,
    CoordinatorAnswer,
    HostProbe,
    Lazy,
    ToolOutput,
    dial_tcp,
    run_tool,
)


class Session(ApiSession):
    """A session whose requests end with an error of a test, or return their path."""

    error: Exception | None = None
    timeouts: ClassVar[list[float]] = []

    def request_json(self, method: str, path: str, body: object = None, timeout: float = 30.0) -> dict[str, Any]:
        self.timeouts.append(timeout)
        if self.error is not None:
            raise self.error
        return {"path": path, "method": method}


@pytest.mark.parametrize(
    ("script", "expected"),
    [("echo out; echo wrong >&2", ToolOutput(0, "out\n", "wrong\n")), ("exit 3", ToolOutput(3, "", ""))],
)
def test_a_tool_that_ends_has_its_code_and_output(script: str, expected: ToolOutput):
    assert run_tool(("sh", "-c", script), 30.0) == expected


def test_a_tool_that_is_missing_or_late_is_none(tmp_path: Path):
    assert run_tool((str(tmp_path / "none"),), 30.0) is None
    assert run_tool(("sleep", "60"), 0.01) is None


def test_a_port_answers_refuses_or_is_silent(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        assert dial_tcp("127.0.0.1", port) == 0
        accepted, _ = server.accept()
        with accepted:
            assert accepted.recv(1) == b"", "the connection is closed at once"
    assert dial_tcp("127.0.0.1", port) == errno.ECONNREFUSED
    for error, code in ((TimeoutError(), -1), (OSError("without a number"), -1), (OSError(65, "no route"), 65)):

        def fail(address: tuple[str, int], timeout: float, error: Exception = error) -> socket.socket:
            assert (address, timeout) == (("127.0.0.1", port), DIAL_TIMEOUT_SECONDS)
            raise error

        monkeypatch.setattr(socket, "create_connection", fail)
        assert dial_tcp("127.0.0.1", port) == code


def test_a_lazy_value_is_computed_once_and_again_only_after_an_error():
    calls: list[int] = []

    def make() -> int:
        calls.append(1)
        if len(calls) == 1:
            raise OSError("not now")
        return len(calls)

    value = Lazy(make)
    with pytest.raises(OSError, match="not now"):
        value()
    assert (value(), value(), len(calls)) == (2, 2, 2)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (None, CoordinatorAnswer({"path": "/api/v1/nodes", "method": "GET"})),
        (CommandError(DENIED, "the key is wrong"), CoordinatorAnswer(None, DENIED, "the key is wrong")),
        (OSError("no route"), CoordinatorAnswer(None, 1, "no route")),
        (ValueError("no JSON"), CoordinatorAnswer(None, 1, "no JSON")),
    ],
)
def test_a_failed_request_is_an_answer_with_its_exit_code(
    tmp_path: Path, error: Exception | None, expected: CoordinatorAnswer
):
    session = Session(tmp_path, None, None, "text")
    object.__setattr__(session, "error", error)
    assert HostProbe(session).read_nodes() == expected
    assert session.timeouts[-1] == ANSWER_TIMEOUT_SECONDS


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (ToolOutput(0, 'a warning\n{"version": 1}\n'), {"version": 1}),
        (ToolOutput(1, '{"version": 1}'), None),
        (ToolOutput(0, ""), None),
        (ToolOutput(0, "[1]"), None),
        (ToolOutput(0, "{"), None),
        (None, None),
    ],
)
@pytest.mark.parametrize(("limit", "seconds"), [(9.0, 9.0 - CHILD_MARGIN_SECONDS), (0.5, 1.0)])
def test_a_child_is_asked_for_one_object_within_the_time_of_the_examination(
    tmp_path: Path, output: ToolOutput | None, expected: object, limit: float, seconds: float
):
    asked: list[tuple[tuple[str, ...], float]] = []

    def run(command: tuple[str, ...], timeout: float) -> ToolOutput | None:
        asked.append((command, timeout))
        return output

    here = HostProbe(ApiSession(tmp_path, None, None, "text"), run=run, timeout_seconds=limit)
    for read, module in (
        (here.read_inspection, ["node.inspect.report", "--state", str(tmp_path)]),
        (here.read_device, ["node.engine.process.device_info"]),
    ):
        assert read() == expected
        command, timeout = asked.pop()
        assert command == (sys.executable, "-P", "-m", *module)
        assert timeout == pytest.approx(seconds)


def test_concurrent_checks_share_one_computation():
    started, calls = threading.Event(), list[int]()

    def make() -> int:
        calls.append(1)
        started.wait(0.05)
        return len(calls)

    value, found = Lazy(make), list[int]()
    threads = [threading.Thread(target=lambda: found.append(value())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (found, calls) == ([1] * 4, [1])


def test_output_of_a_failed_tool_does_not_count(tmp_path: Path):
    limits: list[float] = []
    for output, text in ((ToolOutput(0, "out"), "out"), (ToolOutput(1, "out"), ""), (None, "")):

        def run(_: tuple[str, ...], seconds: float, output: ToolOutput | None = output) -> ToolOutput | None:
            limits.append(seconds)
            return output

        assert HostProbe(ApiSession(tmp_path, None, None, "text"), run=run).run_tool("tool") == text
    assert limits == [TOOL_TIMEOUT_SECONDS] * 3


def test_a_slow_tool_or_peer_is_named_within_the_time_of_all_checks(tmp_path: Path):
    whole = HostProbe(ApiSession(tmp_path, None, None, "text")).timeout_seconds
    assert whole < 5, "the manual promises 5 s"
    for seconds in (
        TOOL_TIMEOUT_SECONDS,
        ANSWER_TIMEOUT_SECONDS,
        2 * DIAL_TIMEOUT_SECONDS,
        whole - CHILD_MARGIN_SECONDS,
        network_checks.MULTICAST_TIMEOUT_SECONDS,
    ):
        assert 0.5 < seconds < whole


def test_variables_count_in_both_cases_unless_they_are_empty(tmp_path: Path):
    environ = {"HTTP_PROXY": "a", "https_proxy": "b", "ALL_PROXY": ""}
    here = HostProbe(ApiSession(tmp_path, None, None, "text"), environ=environ)
    assert here.find_variables("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY") == ["HTTP_PROXY", "HTTPS_PROXY"]


def test_a_state_folder_shows_its_coordinator_and_its_node(tmp_path: Path):
    here = HostProbe(ApiSession(tmp_path, None, None, "text"))
    assert (here.state, here.has_cluster, here.has_node) == (tmp_path, False, False)
    (tmp_path / "cluster.db").touch()
    assert (here.has_cluster, here.has_node) == (True, False)
    identity = tmp_path / "node" / "identity" / "identity.json"
    identity.parent.mkdir(parents=True)
    identity.write_text(json.dumps({}))
    assert (here.has_cluster, here.has_node) == (True, True)
