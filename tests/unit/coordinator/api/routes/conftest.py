"""The complete coordinator with its cluster port, and an administrator's client of its API."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.support.cluster.cluster_port import Port, opened


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[Port]:
    async with opened(tmp_path) as made:
        yield made


@pytest.fixture
async def boss(port: Port) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client with a key of the scope `admin`."""
    async with port.client("admin") as made:
        yield made
