"""Slots for connections: few for a stranger; a new one ends the longest idle one, but none that awaits an answer."""

import tracemalloc

import pytest

from coordinator.http import connection_slots as places_module
from coordinator.http.connection_slots import (
    RESERVED_FILES,
    ConnectionSlot,
    ConnectionSlots,
    compute_max_connections,
    get_origin,
    is_this_machine,
)


def taken(places: ConnectionSlots, address: str, ended: list[ConnectionSlot]) -> ConnectionSlot:
    place = places.reserve_slot(address)
    assert place is not None
    place.bind(lambda: ended.append(place))
    place.record_handshake_end()
    return place


def test_an_address_without_a_key_has_few_places_and_its_longest_at_rest_ends():
    places, ended = ConnectionSlots(max_connections=100, max_unauthenticated=3), list[ConnectionSlot]()
    mine = [taken(places, "192.0.2.1", ended) for _ in range(3)]
    others = [taken(places, "192.0.2.2", ended) for _ in range(3)]
    mine[0].mark_busy()
    mine[0].mark_idle()
    taken(places, "192.0.2.1", ended)
    assert ended == [mine[1]]
    assert len(places) == 6
    for one in (*others, mine[0], mine[2]):
        one.mark_busy()


def test_a_connection_that_is_answered_never_ends_for_another():
    places, ended = ConnectionSlots(max_connections=100, max_unauthenticated=3), list[ConnectionSlot]()
    for _ in range(3):
        taken(places, "192.0.2.1", ended).mark_busy()
    assert places.reserve_slot("192.0.2.1") is None
    assert (ended, places.refused, len(places)) == ([], 1, 3)


def test_a_connection_that_is_answered_never_ends_for_another_address():
    places, ended = ConnectionSlots(max_connections=4, max_unauthenticated=3), list[ConnectionSlot]()
    busy = [taken(places, "192.0.2.1", ended), taken(places, "192.0.2.2", ended)]
    for one in busy:
        one.mark_busy()
    for number in range(5):
        taken(places, f"192.0.2.{number + 10}", ended)
    assert not set(ended) & set(busy)


def test_connection_slots_grow_for_an_address_with_a_valid_key():
    places, ended = ConnectionSlots(max_connections=100, max_unauthenticated=3), list[ConnectionSlot]()
    for _ in range(50):
        one = taken(places, "192.0.2.1", ended)
        one.mark_busy()
        one.record_valid_key()
    assert places.reserve_slot("192.0.2.1") is None
    assert taken(places, "192.0.2.2", ended)


def test_idle_unauthenticated_connections_of_many_addresses_never_keep_a_new_one_out():
    places, ended = ConnectionSlots(max_connections=100, max_unauthenticated=3), list[ConnectionSlot]()
    idle = [taken(places, f"198.51.100.{number}", ended) for number in range(100)]
    for _ in range(30):
        taken(places, "127.0.0.1", ended)
    assert ended == idle[:30]
    assert len(places) == 100


def test_handshakes_are_bounded_in_all():
    places, ended = (
        ConnectionSlots(max_connections=100, max_unauthenticated=100, max_handshakes=5),
        list[ConnectionSlot](),
    )
    begun = list[ConnectionSlot]()
    for number in range(20):
        place = places.reserve_slot(f"198.51.100.{number}")
        assert place is not None
        place.bind(lambda place=place: ended.append(place))
        begun.append(place)
    assert ended == begun[:15]
    assert len(places) == 5


def test_a_place_is_given_back_once():
    places = ConnectionSlots(max_connections=10)
    place = places.reserve_slot("192.0.2.1")
    assert place is not None
    for _ in range(3):
        place.release()
        place.mark_idle()
        place.mark_busy()
    assert len(places) == 0


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "::ffff:127.0.0.1"])
def test_a_client_of_this_machine_needs_no_key_for_many_connections(address: str):
    places, ended = ConnectionSlots(max_connections=100, max_unauthenticated=3), list[ConnectionSlot]()
    for _ in range(50):
        taken(places, address, ended).mark_busy()
    assert places.reserve_slot(address) is None, "half of all connections"


@pytest.mark.parametrize(
    ("address", "whose"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("2001:db8::1", "2001:db8::"),
        ("2001:db8::ffff:1", "2001:db8::"),
        ("fe80::1%en0", "fe80::"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("::1", "::1"),
        ("::2", "::"),
        ("", ""),
    ],
)
def test_a_host_with_a_network_of_addresses_is_one(address: str, whose: str):
    assert get_origin(address) == whose


def test_descriptors_are_kept_for_links_and_the_log():
    assert compute_max_connections(1024) == 1024 - RESERVED_FILES
    assert compute_max_connections(100_000) == 4096
    assert compute_max_connections(64) == 16


def test_an_ipv6_network_of_64_bits_is_one_origin():
    assert get_origin("2001:db8::8000:0:0:1") == "2001:db8::"


@pytest.mark.parametrize(
    ("address", "ours"), [("127.0.0.1", True), ("::1", True), ("", True), ("192.0.2.1", False), ("fd00::1", False)]
)
def test_this_machine_is_loopback_or_a_socket_without_an_address(address: str, ours: bool):
    assert is_this_machine(address) is ours


def test_new_connections_are_refused_and_counted_where_all_are_answered():
    places, ended = ConnectionSlots(max_connections=2, max_unauthenticated=5), list[ConnectionSlot]()
    assert (places.shed, places.refused) == (0, 0)
    busy = [taken(places, f"192.0.2.{number}", ended) for number in range(2)]
    for one in busy:
        one.mark_busy()
    assert places.reserve_slot("192.0.2.9") is None
    assert (places.shed, places.refused, ended) == (0, 1, [])
    busy[0].mark_idle()
    assert places.reserve_slot("192.0.2.9") is not None
    assert (places.shed, places.refused, ended) == (1, 1, busy[:1])


def test_completed_handshake_is_never_evicted():
    places, ended = (
        ConnectionSlots(max_connections=10, max_unauthenticated=10, max_handshakes=1),
        list[ConnectionSlot](),
    )
    first = taken(places, "192.0.2.1", ended)
    second = places.reserve_slot("192.0.2.2")
    assert second is not None
    second.bind(lambda: ended.append(second))
    assert ended == []
    taken(places, "192.0.2.3", ended)
    assert ended == [second]
    assert first not in ended


def test_the_longest_at_rest_is_the_one_that_was_answered_first():
    places, ended = ConnectionSlots(max_connections=2, max_unauthenticated=5), list[ConnectionSlot]()
    first, second = (taken(places, "192.0.2.1", ended) for _ in range(2))
    first.mark_idle()
    taken(places, "192.0.2.1", ended)
    assert ended == [second]


def test_a_slot_is_authenticated_by_a_valid_key_stored_for_the_newest_addresses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(places_module, "MAX_KNOWN_ADDRESSES", 2)
    places, ended = ConnectionSlots(max_connections=100, max_unauthenticated=1), list[ConnectionSlot]()
    for address in ("192.0.2.1", "192.0.2.2", "192.0.2.1", "192.0.2.3"):
        place = taken(places, address, ended)
        assert not place.has_valid_key
        place.record_valid_key()
        assert place.has_valid_key
        place.release()
    known = list[str]()
    for address in ("192.0.2.1", "192.0.2.2", "192.0.2.3"):
        taken(places, address, ended).mark_busy()
        known += [address] if places.reserve_slot(address) is not None else []
    assert known == ["192.0.2.1", "192.0.2.3"], "the one that was seen longest ago is forgotten"


def test_closed_connection_frees_its_slot_and_is_not_remembered():
    places, ended = ConnectionSlots(max_connections=100, max_unauthenticated=2), list[ConnectionSlot]()
    first, second = (taken(places, "192.0.2.1", ended) for _ in range(2))
    for one in (first, second):
        one.mark_busy()
    first.release()
    second.mark_idle()
    second.mark_busy()
    taken(places, "192.0.2.1", ended).mark_busy()
    assert places.reserve_slot("192.0.2.1") is None
    tracemalloc.start()
    try:
        for number in range(2000):
            place = places.reserve_slot(f"198.51.{number // 250}.{number % 250}")
            assert place is not None
            place.release()
        get_origin.cache_clear()
        is_this_machine.cache_clear()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 100_000
