"""Places for connections: few for a stranger, the longest at rest ends for a new one, none that is answered does."""

import pytest

from coordinator.places import RESERVED_FILES, Place, Places, origin, room_for


def taken(places: Places, address: str, ended: list[Place]) -> Place:
    place = places.take(address)
    assert place is not None
    place.end = lambda: ended.append(place)
    place.greeted()
    return place


def test_an_address_without_a_key_has_few_places_and_its_longest_at_rest_ends():
    places, ended = Places(most=100, strangers=3), list[Place]()
    mine = [taken(places, "192.0.2.1", ended) for _ in range(3)]
    others = [taken(places, "192.0.2.2", ended) for _ in range(3)]
    mine[0].work()
    mine[0].rest()
    taken(places, "192.0.2.1", ended)
    assert ended == [mine[1]]
    assert len(places) == 6
    for one in (*others, mine[0], mine[2]):
        one.work()


def test_a_connection_that_is_answered_never_ends_for_another():
    places, ended = Places(most=100, strangers=3), list[Place]()
    for _ in range(3):
        taken(places, "192.0.2.1", ended).work()
    assert places.take("192.0.2.1") is None
    assert (ended, places.refused, len(places)) == ([], 1, 3)


def test_a_connection_that_is_answered_never_ends_for_another_address():
    places, ended = Places(most=4, strangers=3), list[Place]()
    busy = [taken(places, "192.0.2.1", ended), taken(places, "192.0.2.2", ended)]
    for one in busy:
        one.work()
    for number in range(5):
        taken(places, f"192.0.2.{number + 10}", ended)
    assert not set(ended) & set(busy)


def test_a_good_key_gives_an_address_more_places():
    places, ended = Places(most=100, strangers=3), list[Place]()
    for _ in range(50):
        one = taken(places, "192.0.2.1", ended)
        one.work()
        one.know()
    assert places.take("192.0.2.1") is None
    assert taken(places, "192.0.2.2", ended)


def test_idle_strangers_of_many_addresses_never_keep_a_new_one_out():
    places, ended = Places(most=100, strangers=3), list[Place]()
    idle = [taken(places, f"198.51.100.{number}", ended) for number in range(100)]
    for _ in range(30):
        taken(places, "127.0.0.1", ended)
    assert ended == idle[:30]
    assert len(places) == 100


def test_handshakes_are_bounded_in_all():
    places, ended = Places(most=100, strangers=100, handshakes=5), list[Place]()
    begun = list[Place]()
    for number in range(20):
        place = places.take(f"198.51.100.{number}")
        assert place is not None
        place.end = lambda place=place: ended.append(place)
        begun.append(place)
    assert ended == begun[:15]
    assert len(places) == 5


def test_a_place_is_given_back_once():
    places = Places(most=10)
    place = places.take("192.0.2.1")
    assert place is not None
    for _ in range(3):
        place.leave()
        place.rest()
        place.work()
    assert len(places) == 0


@pytest.mark.parametrize(("address", "whose"), [
    ("192.0.2.1", "192.0.2.1"), ("2001:db8::1", "2001:db8::"), ("2001:db8::ffff:1", "2001:db8::"),
    ("fe80::1%en0", "fe80::"), ("::ffff:192.0.2.1", "192.0.2.1"), ("", ""),
])  # fmt: skip
def test_a_host_with_a_network_of_addresses_is_one(address: str, whose: str):
    assert origin(address) == whose


def test_descriptors_are_kept_for_links_and_the_log():
    assert room_for(1024) == 1024 - RESERVED_FILES
    assert room_for(100_000) == 4096
    assert room_for(64) == 16
