"""A node in the test's own process, assembled as `node.run` does."""

from collections.abc import Callable
from pathlib import Path

from node.agent.identity import NodeIdentity
from node.agent.link_keeper import LinkTimeouts
from node.assembly import Node, assemble
from node.memory.limits import Limiter
from node.memory.sensor import open_machine
from node.settings import NodeSettings
from tests.support.cluster.enrolment import HARDWARE


def unstarted_node(
    identity: NodeIdentity,
    state: Path,
    link_timeouts: LinkTimeouts | None = None,
    on_ready: Callable[[str], None] = lambda address: None,
) -> Node:
    """Return a node with default settings. Only its agent is run by the test; its engine is not started."""
    settings = NodeSettings()
    machine = open_machine(settings)
    return assemble(
        identity,
        settings,
        state,
        machine,
        Limiter(settings, machine, {}),
        HARDWARE,
        version="0",
        on_ready=on_ready,
        link_timeouts=link_timeouts,
    )
