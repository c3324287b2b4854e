"""Names, ids and URIs."""

from wire.identity import (
    NodeId,
    PeerIdentity,
    build_coordinator_uri,
    build_node_uri,
    is_valid_name,
    is_valid_request_id,
    parse_uri,
)


def test_uris_name_the_role() -> None:
    node = NodeId("n-1")
    assert parse_uri(build_node_uri("c", node)) == PeerIdentity("c", node)
    assert parse_uri(build_coordinator_uri("c")) == PeerIdentity("c", None)
    for wrong in (
        "https://c/node/n",
        "cluster://c/node/",
        "cluster://c/",
        "cluster://c/node/a/b",
        "cluster://c/coordinator/x",
    ):
        assert parse_uri(wrong) is None


def test_names_are_safe_to_print() -> None:
    assert is_valid_name("Studio A.local")
    for wrong in ("", " a", "a\n", "<b>", "ü", "a" * 64, "a\x1b[0m", "-a"):
        assert not is_valid_name(wrong)
    assert is_valid_request_id("req-1._x")
    assert not is_valid_request_id("a b")
    assert not is_valid_request_id("a" * 65)
