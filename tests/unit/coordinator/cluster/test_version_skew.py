import pytest

from coordinator.cluster.version_skew import MemberVersion, compare_versions, parse_version
from wire.identity import PROTOCOL


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("1.2.3", (1, 2, 3)),
        ("0.10.0rc1", (0, 10, 0)),
        ("1.2.3+local.7", (1, 2, 3)),
        ("", ()),
        ("junk", ()),
        ("1.2.3.4.5", (1, 2, 3, 4)),
    ],
)
def test_a_version_is_its_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_version(text) == numbers


@pytest.mark.parametrize(
    ("version", "protocol", "ok", "words"),
    [
        ("0.3.2", PROTOCOL, True, ""),
        ("0.3.1", PROTOCOL, False, "older: `cluster node drain studio"),
        ("0.2.9", PROTOCOL, False, "older: `cluster node drain studio"),
        ("0.10.0", PROTOCOL, False, "newer than the coordinator"),
        ("", 0, False, "not seen"),
        ("0.1.0", PROTOCOL + 1, False, "cannot take part: protocol 2; update macpool on the coordinator"),
    ],
)
def test_every_member_has_its_advice(version: str, protocol: int, ok: bool, words: str) -> None:
    (line,) = compare_versions("0.3.2", [MemberVersion("studio", version, protocol, "ready")])
    assert line.ok is ok
    assert words in line.advice
    assert bool(line.advice) is not ok
    assert line.joinable is (protocol <= PROTOCOL)
