"""The lines and the table of `cluster node show`, from a node whose numbers all differ."""

from typing import Any

import pytest

from coordinator.cli.commands.tokens_and_keys import format_minute
from coordinator.cli.node_description import build_model_rows, describe_member, describe_work
from wire.units import GIB, KIB, MIB

JOINED = 1_769_860_800.0
COUNTS = {
    "forwards": 1,
    "steps": 70,
    "failures": 2,
    "shrinks": 1,
    "preemptions": 3,
    "overs": 4,
    "departures": 5,
    "prefill_tokens": 60,
    "returned_tokens": 80,
    "recomputed_tokens": 9,
}
CACHE: dict[str, Any] = {
    "nbytes": 128 * KIB,
    "entries": 3,
    "hits": 10,
    "hit_tokens": 11,
    "stores": 12,
    "evictions": 13,
    "store": "",
    "models": [{"model": "a", "nbytes": 91 * KIB}],
}
DISK = {
    "store": "s",
    "disk_bytes": 3 * GIB,
    "disk_files": 14,
    "disk_hits": 1,
    "disk_hit_tokens": 15,
    "disk_read_bytes": 16 * MIB,
    "disk_saves": 17,
    "disk_persisted": 18,
    "disk_drops": 19,
    "disk_errors": 1,
    "disk_evictions": 20,
    "disk_waiting": 21,
    "disk_quota": 22 * GIB,
    "disk_budget": 23 * MIB,
}


def a_video(**changes: Any) -> dict[str, Any]:
    none: dict[str, Any] = {"packages": [], "leases": [], "allowed": False, "ready": False, "cause": ""}
    return none | {"ray": "", "ray_cause": ""} | changes


def a_node(**changes: Any) -> dict[str, Any]:
    """Return a ready node with one loaded model, and changed fields."""
    return {
        "name": "studio",
        "id": "n1",
        "state": "ready",
        "cordoned": False,
        "reason": "",
        "heard_seconds": 2.0,
        "joined": JOINED,
        "chip": "Apple M2 Ultra",
        "memory": 192 * GIB,
        "system": "macOS 15.2",
        "version": "0.1.0",
        "protocol": 1,
        "labels": ["room=lab", "fast"],
        "sharing": {"when": "idle", "paused": False, "why": "", "until": None, "by_hand": False},
        "in_flight": 5,
        "running": 3,
        "waiting": 4,
        "engine": {
            "kind": "mlx",
            "state": "ready",
            "cause": "",
            "rows": 32,
            "recycles": 1,
            "leaked": 0,
            "counts": COUNTS,
            "cache": CACHE,
        },
        "disk": {"free": 53 * GIB, "total": 252 * GIB, "folder": "/models"},
        "video": a_video(),
        "models": [],
    } | changes


def test_member_lines_have_each_value_in_its_place():
    assert describe_member(a_node()) == [
        "name      studio (n1)",
        "state     ready",
        f"report    2s old; joined {format_minute(JOINED)}",
        "machine   Apple M2 Ultra, 192.0 GiB, macOS 15.2",
        "macpool   0.1.0, protocol 1",
        "labels    room=lab, fast",
        "sharing   shared (idle)",
        "requests  5 in flight; in its engine 3 running, 4 waiting",
        "engine    mlx, ready; at most 32 rows at once; 1 planned restart",
        "disk      53.0 GiB free of 252.0 GiB, /models",
        "video     no model",
    ]


def test_member_lines_of_a_node_in_trouble_name_the_causes():
    engine = {"kind": "mlx", "state": "failed", "cause": "SIGABRT", "rows": 1, "recycles": 0, "leaked": 6 * GIB}
    lines = describe_member(
        a_node(
            state="suspect",
            reason="silent for 3 s",
            cordoned=True,
            labels=[],
            engine=engine,
            heard_seconds=None,
            version="",
            protocol=0,
            disk={"free": None, "total": None, "folder": ""},
        )
    )
    assert lines[1] == "state     suspect, cordoned: silent for 3 s"
    assert lines[2].startswith("report    - old; ")
    assert lines[4:6] == ["macpool   unknown version, protocol -", "labels    -"]
    assert lines[8:10] == [
        "engine    mlx, failed: SIGABRT; at most 1 row at once; 0 planned restarts, 6.0 GiB still wired by ended "
        "processes",
        "disk      - free of -, folder unknown",
    ]


@pytest.mark.parametrize(
    ("video", "lines"),
    [
        ({"cause": "no environment"}, ["video     no model: no environment"]),
        (
            {"packages": [{"name": "wan", "cause": ""}], "ready": True, "ray": "ready"},
            ["video     not allowed: `cluster node allow-video`; ready; wan"],
        ),
        (
            {
                "packages": [{"name": "wan", "cause": ""}, {"name": "ltx", "cause": "a file is missing"}],
                "allowed": True,
                "ready": True,
                "ray_cause": "Ray does not start",
                "leases": [
                    {"size": 20 * GIB, "phase": "denoising", "progress": 40},
                    {"size": 0, "phase": "ended", "progress": 100},
                ],
            },
            [
                "video     allowed; not ready: Ray does not start; wan, ltx (a file is missing)",
                "lease     20.0 GiB, denoising 40 %",
            ],
        ),
    ],
)
def test_video_lines_name_models_state_and_leases(video: dict[str, Any], lines: list[str]):
    assert describe_member(a_node(video=a_video(**video)))[10:] == lines


def test_work_lines_have_each_count_in_its_place():
    assert describe_work(a_node()["engine"]) == [
        "work      1 forward pass, 70 decode steps, 60 prompt tokens computed; 2 failed requests",
        "pressure  1 smaller pass, 3 preemptions, 9 of 80 returned tokens computed again, 4 passes over the cap; "
        "5 idle models unloaded",
        "cache     3 prefixes, 128.0 KiB; 10 hits with 11 tokens; 12 stored, 13 evicted",
        "on disk   no cache",
    ]
    assert describe_work({"counts": COUNTS, "cache": CACHE | DISK})[3] == (
        "on disk   14 files, 3.0 GiB of 22.0 GiB; 1 hit with 15 tokens, 16.0 MiB read; 18 of 17 parts written, "
        "21 waiting, 19 dropped, 20 evicted, 1 error; 23.0 MiB may be written now"
    )


def test_models_are_sorted_with_state_speeds_and_cached_bytes():
    speeds = {"weights": 4 * GIB, "context": 32768, "prefill_speed": 5540.2, "decode_speed": 88.6}
    states = {
        "d": {"model": "failed", "cause": "no tokenizer", "measured": None},
        "c": {"model": "loading", "progress": 0.414, "measured": None},
        "b": {"model": "loaded", "measured": None},
        "e": {"model": "known", "measured": None},
        "a": {"model": "loaded", "measured": {"max_batch": 32}},
    }
    models = [{"name": name, **speeds, **state} for name, state in states.items()]
    numbers = ("4.0 GiB", "32768", "5,540", "89")
    assert build_model_rows(a_node(models=models)) == [
        ("a", "loaded", *numbers, "91.0 KiB"),
        ("b", "loaded, not measured", *numbers, "0.0 MiB"),
        ("c", "loading 41 %", *numbers, "0.0 MiB"),
        ("d", "failed: no tokenizer", *numbers, "0.0 MiB"),
        ("e", "not loaded", *numbers, "0.0 MiB"),
    ]
