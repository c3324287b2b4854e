from coordinator.ratelimit import MOST_ADDRESSES, RateLimit


def test_a_burst_then_a_rate() -> None:
    limit = RateLimit(per_minute=30, burst=3)
    assert [limit.wait("10.0.0.1", 0.0) for _ in range(3)] == [0, 0, 0]
    assert limit.wait("10.0.0.1", 0.0) == 2.0
    assert limit.wait("10.0.0.2", 0.0) == 0
    assert limit.wait("10.0.0.1", 2.0) == 0
    assert limit.wait("10.0.0.1", 2.0) > 0


def test_one_host_cannot_use_its_whole_ipv6_network() -> None:
    limit = RateLimit(burst=1)
    assert limit.wait("fd00::1", 0.0) == 0
    assert limit.wait("fd00::2%en0", 0.0) > 0
    assert limit.wait("fd01::1", 0.0) == 0
    assert limit.wait("::ffff:10.0.0.1", 0.0) == 0
    assert limit.wait("10.0.0.1", 0.0) > 0


def test_memory_is_bounded() -> None:
    limit = RateLimit(burst=1)
    for number in range(MOST_ADDRESSES + 10):
        limit.wait(f"host{number}", 0.0)
    assert len(limit._buckets) == MOST_ADDRESSES
