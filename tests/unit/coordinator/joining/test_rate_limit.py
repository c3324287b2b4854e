from coordinator.joining.rate_limit import MAX_ADDRESSES, RateLimit, get_network


def test_a_burst_then_a_rate() -> None:
    limit = RateLimit(per_minute=30, burst=3)
    assert [limit.count_attempt("10.0.0.1", 0.0) for _ in range(3)] == [0, 0, 0]
    assert limit.count_attempt("10.0.0.1", 0.0) == 2.0
    assert limit.count_attempt("10.0.0.2", 0.0) == 0
    assert limit.count_attempt("10.0.0.1", 2.0) == 0
    assert limit.count_attempt("10.0.0.1", 2.0) > 0


def test_one_host_cannot_use_its_whole_ipv6_network() -> None:
    limit = RateLimit(burst=1)
    assert limit.count_attempt("fd00::1", 0.0) == 0
    assert limit.count_attempt("fd00::2%en0", 0.0) > 0
    assert limit.count_attempt("fd01::1", 0.0) == 0
    assert limit.count_attempt("::ffff:10.0.0.1", 0.0) == 0
    assert limit.count_attempt("10.0.0.1", 0.0) > 0


def test_memory_is_bounded() -> None:
    limit = RateLimit(burst=1)
    for number in range(MAX_ADDRESSES + 10):
        limit.count_attempt(f"host{number}", 0.0)
    assert limit.buckets == MAX_ADDRESSES


def test_a_rest_fills_no_more_than_a_burst_and_the_wait_is_until_the_next_attempt() -> None:
    limit = RateLimit(per_minute=30, burst=3)
    limit.count_attempt("10.0.0.1", 0.0)
    assert [limit.count_attempt("10.0.0.1", 1000.0) for _ in range(4)] == [0, 0, 0, 2.0]
    assert limit.count_attempt("10.0.0.1", 1001.0) == 1.0


def test_an_ipv6_network_of_64_bits_is_one_address() -> None:
    hosts = ("fd00::1", "fd00::8000:0:0:1", "fd00:0:0:1::1", "::ffff:10.0.0.1", "10.0.0.1", "none")
    assert [get_network(host) for host in hosts] == [
        "fd00::/64",
        "fd00::/64",
        "fd00:0:0:1::/64",
        "10.0.0.1",
        "10.0.0.1",
        "none",
    ]


def test_the_address_that_was_unused_for_longest_is_forgotten_first() -> None:
    limit = RateLimit(burst=1)
    for number in range(MAX_ADDRESSES + 1):
        limit.count_attempt(f"host{number}", 0.0)
    assert limit.count_attempt(f"host{MAX_ADDRESSES}", 0.0) > 0
    assert limit.count_attempt("host1", 0.0) > 0
    assert limit.count_attempt("host0", 0.0) == 0
