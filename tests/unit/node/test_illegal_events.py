"""Illegal events of a node's state machines: logged with their machine, and counted."""

from structlog.testing import capture_logs

from node.illegal_events import IllegalEvents
from wire.state_machine import IllegalEventError


def test_an_illegal_event_is_logged_and_counted():
    events = IllegalEvents()
    with capture_logs() as logs:
        for machine in ("link", "lease"):
            events.record(machine, IllegalEventError(f"the {machine} is idle: Ended cannot happen"))
    assert events.count == 2
    assert [(line["event"], line["machine"], line["error"]) for line in logs] == [
        ("illegal event", "link", "the link is idle: Ended cannot happen"),
        ("illegal event", "lease", "the lease is idle: Ended cannot happen"),
    ]
