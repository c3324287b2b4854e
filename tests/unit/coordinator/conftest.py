from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.coordinator.answering_server import Server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Return a server that gives every request the same answer, for commands."""
    made = Server(tmp_path)
    yield made
    made.http.shutdown()
    made.http.server_close()
