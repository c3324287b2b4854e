"""Program of the coordinator: the output at its start."""

from typing import Any

from structlog.testing import capture_logs

from coordinator.run import announce_ready


def test_coordinator_serves_without_a_reader_of_its_output() -> None:
    printed = list[dict[str, Any]]()

    def fail(facts: dict[str, Any]) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    with capture_logs() as logs:
        announce_ready(printed.append, {"schema": 1})
        announce_ready(fail, {})
    assert printed == [{"schema": 1}]
    assert [(line["event"], line["error"]) for line in logs] == [("ready line not printed", "[Errno 32] Broken pipe")]
