"""Refusals of video requests before they are queued, and the clip of an accepted one."""

from typing import Any

import pytest
from msgspec.structs import replace

from coordinator.video.settings import VideoSettings
from coordinator.video.state.admission import FULL_RETRY_SECONDS, admit_clip
from coordinator.video.state.job_table import JobTable
from coordinator.video.state.jobs import RequestedClip
from coordinator.video.state.memory_model import MARGIN_BYTES
from router.admission.rate_limits import KeyLimits
from router.dialects.openai.video_schema import VideoBody
from router.errors import Problem
from router.placement.cluster_view import ClusterView, NodeView
from tests.support.cluster.loopback_cluster import a_memory, a_model
from tests.unit.coordinator.video.state.test_job_table import a_job
from tests.unit.coordinator.video.state.test_lease_placement import WAN, a_node
from wire.report import Memory
from wire.units import GIB
from wire.video import VideoPackage, VideoState

SMALL = VideoPackage("small", engine="1.0", expert=GIB)
BROKEN = VideoPackage("broken", cause="a file is missing")


def video(*packages: VideoPackage, **changes: Any) -> VideoState:
    return replace(VideoState(True, "", "ray", packages), **changes)


def admit(
    *nodes: NodeView,
    table: JobTable | None = None,
    limits: KeyLimits | None = None,
    settings: VideoSettings | None = None,
    **body: Any,
) -> RequestedClip | Problem:
    asked = VideoBody.model_validate({"prompt": "a fox", "model": "wan"} | body)
    return admit_clip(asked, ClusterView(nodes), table or JobTable(), {}, settings or VideoSettings(), limits)


def refuse(*nodes: NodeView, **more: Any) -> Problem:
    problem = admit(*nodes, **more)
    assert isinstance(problem, Problem), problem
    return problem


def test_an_accepted_request_is_a_clip_with_its_defaults_and_the_labels_of_the_key():
    limits = KeyLimits(labels=("lab",))
    clip = admit(a_node("a", labels=frozenset({"lab"})), limits=limits, size="480x272", frames=5, seed=7, steps=3)
    assert clip == RequestedClip("wan", "a fox", 480, 272, 5, 16, 3, 30 * 17, "", None, None, 7, (), ("lab",))
    clip = admit(a_node("a"), negative_prompt="rain", guidance=2.0, guidance_2=3.0, fps=8, seconds=2, model=None)
    assert isinstance(clip, RequestedClip)
    assert (clip.model, clip.negative_prompt, clip.guidance, clip.guidance_2) == ("wan", "rain", 2.0, 3.0)
    assert (clip.frames, clip.fps, clip.steps, clip.labels) == (17, 8, VideoSettings().default_steps, ())
    assert isinstance(admit(a_node("a"), frames=1), RequestedClip)
    assert refuse(a_node("a"), frames=0).param == "frames"


def test_videos_that_are_switched_off_are_refused_first():
    problem = refuse(settings=VideoSettings(enabled=False))
    assert (problem.status, problem.code) == (503, "video_disabled")


def test_the_model_of_a_request_is_found_or_named():
    both = a_node("a", video=video(WAN, SMALL))
    problem = refuse(both, model=None)
    assert (problem.status, problem.message) == (400, "model: name the model (one of small, wan)")
    assert refuse(a_node("a", video=video(BROKEN)), model=None).message.endswith("(none is in the pool yet)")
    problem = refuse(both, model="wann")
    assert (problem.status, problem.code) == (404, "model_not_found")
    assert "the nearest names are wan" in problem.message
    assert "broken" not in refuse(both, model="broken").message.partition("'broken'")[2]
    problem = refuse(a_node("a", video=video(WAN, BROKEN)), model="broken")
    assert (problem.status, problem.message.partition(": ")[2]) == (404, "a: a file is missing")
    other = replace(BROKEN, name="other", cause="its digest is wrong")
    problem = refuse(a_node("a", video=video(WAN, BROKEN, other)), model="broken")
    assert problem.message.partition(": ")[2] == "a: a file is missing", "causes of other models do not help"
    names = [replace(SMALL, name=f"wan-{number}") for number in range(5)]
    assert refuse(a_node("a", video=video(*names)), model="wan").message.count("wan-") == 3
    assert refuse(a_node("a", video=video(*names)), model="x").message.endswith("names are wan-0, wan-1, wan-2")
    problem = refuse(a_node("a", models={"tiny": a_model()}), model="tiny")
    assert (problem.status, "/v1/chat/completions" in problem.message) == (400, True)
    assert refuse(model="wan").message.endswith("no node has any")


def test_a_key_uses_its_models_and_nodes_only():
    problem = refuse(a_node("a"), limits=KeyLimits(models=("other",)))
    assert (problem.status, problem.code) == (403, "not_allowed")
    problem = refuse(a_node("a"), limits=KeyLimits(labels=("lab",)))
    assert problem.status == 404


@pytest.mark.parametrize(("body", "param"), [({"fps": 1}, "fps"), ({"steps": 999}, "steps"), ({"size": "9x9"}, "size")])
def test_an_invalid_clip_names_its_parameter(body: dict[str, Any], param: str):
    problem = refuse(a_node("a"), **body)
    assert (problem.status, problem.param) == (400, param)


def test_a_clip_that_fits_on_no_node_has_its_numbers():
    problem = refuse(a_node("a"), settings=VideoSettings(lease="20GiB"))
    assert (problem.status, problem.code, problem.param) == (413, "video_memory_exceeded", "size")
    numbers = problem.memory
    assert numbers is not None
    assert (numbers.ceiling, numbers.cap, numbers.margin, numbers.bound_by) == (
        20 * GIB,
        20 * GIB,
        MARGIN_BYTES,
        "video.lease",
    )
    assert numbers.predicted is not None
    assert numbers.predicted == numbers.estimate + MARGIN_BYTES
    assert numbers.headroom == 20 * GIB - numbers.predicted < 0
    assert (numbers.reserved, numbers.current) == (0, None)
    assert "uncalibrated" in problem.message
    problem = refuse(a_node("a", memory=a_memory(8 * GIB, 24 * GIB)))
    assert problem.status == 413
    assert "no node could ever lend 36.0 GiB" in problem.message
    assert isinstance(admit(a_node("a", memory=a_memory(8 * GIB, 24 * GIB)), a_node("b")), RequestedClip)
    absent = a_node("b", state="lost")
    assert isinstance(admit(a_node("a", memory=a_memory(8 * GIB, 24 * GIB)), absent), RequestedClip)
    unknown = a_node("b", memory=Memory())
    assert isinstance(admit(unknown), RequestedClip), "its cap is not reported yet"


def test_a_pool_whose_nodes_cannot_make_videos_is_refused_with_the_causes():
    off = replace(a_memory(80 * GIB, 128 * GIB), guard=False)
    problem = refuse(a_node("a", memory=off))
    assert (problem.status, problem.code) == (503, "guard_off")
    unready = a_node("b", video=video(WAN, ready=False, cause="no engine"))
    problem = refuse(unready, a_node("c", video_allowed=False))
    assert (problem.status, problem.code) == (503, "video_not_ready")
    assert "b: no engine; c: it is not allowed to make videos" in problem.message
    assert isinstance(admit(unready, a_node("a")), RequestedClip)
    assert isinstance(admit(unready, a_node("a", state="lost")), RequestedClip), "the node may return"


def test_a_full_queue_is_refused_with_a_retry():
    settings = VideoSettings(queue_limit=2)
    jobs = {job.id: job for job in (a_job(1), a_job(2))}
    problem = refuse(a_node("a"), table=JobTable(jobs=jobs), settings=settings)
    assert (problem.status, problem.code, problem.retry_after) == (429, "queue_full", FULL_RETRY_SECONDS)
    jobs["video_2"] = a_job(2, state="completed")
    assert isinstance(admit(a_node("a"), table=JobTable(jobs=jobs), settings=settings), RequestedClip)
