"""Log and count illegal events of a node's state machines. The node reports the count to the coordinator."""

import structlog

from wire.state_machine import IllegalEventError

log = structlog.get_logger("node.illegal_events")


class IllegalEvents:
    """Counter of the events that state machines refused since the start of the agent. Each of them is a bug."""

    def __init__(self) -> None:
        self.count = 0
        """Number of illegal events so far."""

    def record(self, machine: str, error: IllegalEventError) -> None:
        """Log and count an illegal event. `machine` is the name of the state machine."""
        self.count += 1
        log.error("illegal event", machine=machine, error=str(error), exc_info=error)
