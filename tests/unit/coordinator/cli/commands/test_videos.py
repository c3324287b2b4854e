"""Arguments, output and exit codes of `cluster video`."""

import json
from pathlib import Path

import click
import pytest

from coordinator.cli.commands.video.videos import parse_sizes
from coordinator.client.errors import NOT_FOUND, REFUSED, TIMED_OUT
from coordinator.video.state.jobs import JobFault, JobState, to_row
from tests.support.coordinator.answering_server import Server
from tests.unit.coordinator.video.state.test_job_table import a_job
from wire.units import GIB

QUEUED = to_row(a_job(1, phase="waiting for \x1b[31mmemory"))
COMPLETED = to_row(a_job(2, state=JobState.COMPLETED, phase="completed", ended=9.0, peak=GIB))
FAILED = to_row(a_job(3, state=JobState.FAILED, ended=9.0, fault=JobFault("no_headroom", "no node has room")))


def test_sizes_are_a_list_of_width_and_height():
    assert parse_sizes("384x224, 832x480,") == ["384x224", "832x480"]


@pytest.mark.parametrize("text", ["", "384", "384x224,832", "384x", "x224", "384x224x3", "a", "-1x2"])
def test_a_size_without_width_or_height_is_refused(text: str):
    with pytest.raises(click.UsageError, match="is not a list of sizes"):
        parse_sizes(text)


def test_videos_are_listed_with_their_error_or_phase(server: Server):
    server.answer = {"data": [QUEUED, COMPLETED, FAILED]}
    lines = [" ".join(line.split()) for line in server.run("video", "list", "--last", "3").stdout.splitlines()[1:]]
    assert [line.split()[:7] for line in lines] == [
        ["video_1", "queued", "0", "%", "wan", "384x224", "3.062"],
        ["video_2", "completed", "100", "%", "wan", "384x224", "3.062"],
        ["video_3", "failed", "0", "%", "wan", "384x224", "3.062"],
    ]
    assert "\x1b" not in lines[0]
    assert lines[2].endswith("no node has room")
    assert server.asked == [("/v1/videos?limit=3", None)]
    assert server.run("video", "list", "--last", "0").exit_code == 2


def test_a_video_is_shown_without_empty_fields(server: Server):
    server.answer = COMPLETED
    shown = dict(line.split(maxsplit=1) for line in server.run("video", "show", "video/2").stdout.splitlines())
    assert (shown["status"], shown["peak"], shown["progress"]) == ("completed", "1.0 GiB", "100")
    assert not {"object", "schema", "error", "warnings", "remixed_from_video_id"} & set(shown)
    assert server.asked == [("/v1/videos/video%2F2", None)]


def test_a_wait_ends_with_the_video_or_its_time(server: Server):
    server.answer = COMPLETED
    done = server.run("video", "wait", "video_2")
    assert (done.exit_code, done.stdout) == (0, "video_2 completed\n")
    server.answer = FAILED
    done = server.run("video", "wait", "video_3")
    assert (done.exit_code, done.stdout) == (REFUSED, "video_3 failed\n")
    assert "video_3 failed: no_headroom: no node has room" in done.stderr
    server.answer = QUEUED
    done = server.run("video", "wait", "video_1", "--timeout", "0.001s")
    assert done.exit_code == TIMED_OUT
    assert "\x1b" not in done.stderr


def test_a_video_is_cancelled(server: Server):
    server.answer = FAILED
    assert server.run("video", "cancel", "video_3").stdout == "video_3 failed\n"
    assert server.asked == [("/v1/videos/video_3/cancel", None)]


def test_only_given_fields_of_a_video_are_sent(server: Server):
    server.answer = QUEUED | {"warnings": ["rounded"]}
    done = server.run("video", "create", "a", "fox", "--model", "wan", "--size", "384x224", "--seed", "0")
    assert (done.stdout, done.stderr) == ("video_1\n", "rounded\n")
    body = {"prompt": "a fox", "model": "wan", "size": "384x224", "seed": 0}
    assert server.asked == [("/v1/videos", body)]


@pytest.mark.parametrize(("words", "asked"), [((), 1), (("--wait",), 2)])
def test_the_end_of_a_video_is_awaited_only_on_request(server: Server, words: tuple[str, ...], asked: int):
    server.answer = COMPLETED | {"warnings": []}
    assert server.run("video", "create", "a fox", "--model", "wan", *words).stdout == f"{COMPLETED['id']}\n"
    paths = [path for path, _ in server.asked]
    assert paths == ["/v1/videos", f"/v1/videos/{COMPLETED['id']}"][:asked]


def test_calibrate_makes_a_clip_of_each_size_and_deletes_it(server: Server):
    server.answer = COMPLETED | {"models": [{"name": "wan"}], "profiles": []}
    done = server.run(
        "video", "calibrate", "--sizes", "640x368, 384x224", "--steps", "3", "--frames", "9", "-o", "json"
    )
    assert [clip["status"] for clip in json.loads(done.stdout)["clips"]] == ["completed"] * 2
    made = [body for path, body in server.asked if path == "/v1/videos"]
    assert [(body["size"], body["steps"], body["frames"], body["model"]) for body in made] == [
        ("384x224", 3, 9, "wan"),
        ("640x368", 3, 9, "wan"),
    ]
    assert server.methods.count("DELETE") == 2


def test_a_video_is_written_into_its_file_as_a_whole(server: Server, tmp_path: Path):
    server.answer = {"clip": "x" * 1000}
    file = tmp_path / "clip.mp4"
    done = server.run("video", "get", "video_2", "--output-file", str(file))
    assert done.stdout.startswith(f"{file}: ")
    assert len(file.read_bytes()) == len('{"clip": ""}') + 1000
    assert [path.name for path in tmp_path.glob("clip*")] == ["clip.mp4"]
    server.run("video", "get", "video_2", "--thumbnail", "--output-file", str(tmp_path / "thumb.webp"))
    variants = [path.partition("?")[2] for path, _ in server.asked]
    assert variants == ["variant=video", "variant=thumbnail"]
    done = server.run("video", "get", "video_2", "--output-file", str(tmp_path / "none" / "x.mp4"))
    assert done.exit_code == 1
    assert "cannot be written" in done.stderr
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("folder", [".", ""])
@pytest.mark.parametrize("words", [("get", "video_2"), ("create", "a", "fox", "--model", "wan")])
def test_a_folder_in_place_of_the_file_of_a_video_is_refused_before_the_request(
    server: Server, tmp_path: Path, folder: str, words: tuple[str, ...]
):
    done = server.run("video", *words, "--output-file", folder or str(tmp_path))
    assert (done.exit_code, "is a directory" in done.stderr) == (2, True)
    assert server.asked == []


@pytest.mark.parametrize("words", [("show", "video_2"), ("cancel", "video_2"), ("wait", "video_2"), ("list",)])
def test_json_of_videos_names_its_schema(server: Server, words: tuple[str, ...]):
    server.answer = COMPLETED | {"data": []}
    assert json.loads(server.run("video", *words, "-o", "json").stdout)["schema"] == 1


def test_a_clip_is_awaited_and_written_or_its_failure_is_an_error(server: Server, tmp_path: Path):
    file = tmp_path / "fox.mp4"
    words = ("video", "create", "a fox", "--model", "wan", "--output-file", str(file))
    server.answer = COMPLETED | {"warnings": []}
    assert server.run(*words).stdout == f"{COMPLETED['id']}\n"
    assert [path for path, _ in server.asked] == [
        "/v1/videos",
        f"/v1/videos/{COMPLETED['id']}",
        f"/v1/videos/{COMPLETED['id']}/content?variant=video",
    ]
    assert json.loads(file.read_bytes()) == server.answer
    file.unlink()
    server.answer = FAILED | {"warnings": []}
    failed = server.run(*words)
    assert (failed.exit_code, failed.stdout, file.exists()) == (REFUSED, "", False)
    assert "video_3 failed: no_headroom" in failed.stderr


@pytest.mark.parametrize(("words", "name"), [((), "video_2.mp4"), (("--thumbnail",), "video_2.webp")])
def test_a_clip_without_a_file_name_gets_that_of_its_video(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], name: str
):
    monkeypatch.chdir(tmp_path)
    server.answer = {"clip": "x" * (2**20 - 12)}
    before = set(tmp_path.iterdir())
    assert server.run("video", "get", "../video_2", *words).stdout == f"{name}: 1.0 MiB\n"
    assert set(tmp_path.iterdir()) - before == {tmp_path / name}


def test_a_download_that_cannot_replace_its_file_leaves_nothing(server: Server, tmp_path: Path):
    folder = tmp_path / "taken.mp4"
    server.on_request = folder.mkdir
    done = server.run("video", "get", "video_2", "--output-file", str(folder))
    assert (done.exit_code, "cannot be written" in done.stderr) == (1, True)
    assert not list(tmp_path.glob("*.part"))


def test_leases_are_listed_with_their_memory(server: Server):
    lease = {"name": "studio", "size": 36 * GIB, "job": "video_1", "phase": "decoding", "progress": 40}
    lease |= {"footprint": 20 * GIB, "peak": 30 * GIB, "since": 0, "orphan": False}
    server.answer = {"schema": 1, "leases": [lease, lease | {"orphan": True}]}
    lines = [" ".join(line.split()) for line in server.run("video", "leases").stdout.splitlines()[1:]]
    assert [line.startswith("studio 36.0 GiB video_1 decoding 40 % 20.0 GiB 30.0 GiB ") for line in lines] == [True] * 2
    assert [line.endswith(" being returned") for line in lines] == [False, True]
    assert server.asked == [("/api/v1/leases", None)]


@pytest.mark.parametrize(
    ("models", "code", "words"),
    [([], NOT_FOUND, "no node has a model for videos"), (["wan", "ltx"], 2, "name a model with --model: wan, ltx")],
)
def test_a_video_needs_a_model_if_the_pool_has_none_or_several(
    server: Server, models: list[str], code: int, words: str
):
    server.answer = {"models": [{"name": name} for name in models]}
    done = server.run("video", "create", "a fox")
    assert (done.exit_code, words in done.stderr) == (code, True)
    assert [path for path, _ in server.asked] == ["/api/v1/videos/models"]


def test_calibrate_shows_the_measured_values_of_each_clip(server: Server):
    server.answer = COMPLETED | {"models": [{"name": "wan"}], "profiles": [], "wall_seconds": 12.5, "peak": 7 * GIB}
    done = server.run("video", "calibrate", "--sizes", "384x224", "-o", "json")
    assert json.loads(done.stdout)["clips"] == [
        {"size": COMPLETED["size"], "status": "completed", "peak": 7 * GIB, "seconds": 12.5, "error": ""}
    ]
    server.answer = FAILED | {"models": [{"name": "wan"}], "profiles": []}
    (clip,) = json.loads(server.run("video", "calibrate", "--sizes", "384x224", "-o", "json").stdout)["clips"]
    assert (clip["status"], clip["error"]) == ("failed", "no node has room")
