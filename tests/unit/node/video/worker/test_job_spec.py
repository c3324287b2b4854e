import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.video.worker.job_spec import JobSpec, parse_spec
from wire.video import VideoPackage

LEAST = {"prompt": "a fox", "width": 64, "height": 48}


def test_missing_parameters_are_those_of_the_package():
    spec = parse_spec(json.dumps({**LEAST, "seed": 7, "guidance": 4.0, "timeout": 60, "stall": 9}).encode())
    assert isinstance(spec, JobSpec)
    assert (spec.timeout, spec.stall) == (60, 9)
    assert spec.to_worker_input(VideoPackage("wan", fps=24, steps=50, frames=121)) == {
        **LEAST,
        "seed": 7,
        "guidance": 4.0,
        "fps": 24,
        "steps": 50,
        "frames": 121,
    }


def test_parameters_of_a_job_come_before_those_of_the_package():
    given = {**LEAST, "seed": 7, "frames": 33, "fps": 16, "steps": 9}
    spec = parse_spec(json.dumps(given).encode())
    assert isinstance(spec, JobSpec)
    assert spec.to_worker_input(VideoPackage("wan", fps=24, steps=50, frames=121)) == given


def test_numbers_that_are_0_are_parameters_of_the_job():
    spec = parse_spec(json.dumps({**LEAST, "seed": 0, "guidance": 0, "negative_prompt": ""}).encode())
    assert isinstance(spec, JobSpec)
    found = spec.to_worker_input(VideoPackage("wan", fps=24, steps=50, frames=121))
    assert (found["seed"], found["guidance"], found["negative_prompt"]) == (0, 0, "")


@pytest.mark.parametrize(
    "change",
    [
        {"width": 15},
        {"width": 10**9},
        {"width": 8192, "height": 8192},
        {"width": "64"},
        {"frames": 0},
        {"steps": 10**6},
        {"fps": 0},
        {"seed": -1},
        {"prompt": None},
        {"prompt": "x" * 100_001},
        {"timeout": 0},
        {"guidance": 1e9},
        {"out": "/etc/passwd"},
        {"package": "/"},
        {"size": 1},
    ],
    ids=str,
)
def test_an_invalid_spec_is_refused_with_a_sentence(change: dict[str, object]):
    said = parse_spec(json.dumps({**LEAST, **change}).encode())
    assert isinstance(said, str)
    assert len(said) > 20


@given(st.binary(max_size=200))
def test_no_bytes_do_more_than_be_refused(raw: bytes):
    assert isinstance(parse_spec(raw), str | JobSpec)
