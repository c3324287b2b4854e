"""Dispatchers with one and with two nodes, for the tests of this folder."""

from collections.abc import AsyncIterator

import pytest

from tests.support.cluster.manual_pool import A, B, Cluster


@pytest.fixture
async def one() -> AsyncIterator[Cluster]:
    cluster = Cluster(A)
    yield cluster
    cluster.dispatcher.shutdown()
    cluster.settled()


@pytest.fixture
async def two() -> AsyncIterator[Cluster]:
    cluster = Cluster(A, B)
    yield cluster
    cluster.dispatcher.shutdown()
    cluster.settled()
