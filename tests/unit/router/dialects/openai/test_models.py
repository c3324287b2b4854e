"""Models as each dialect lists them, value by value."""

import hashlib
import json

import pytest

from router.admission.rate_limits import KeyLimits
from router.dialects.ollama import models as ollama_models
from router.dialects.openai import models
from router.errors import Problem
from router.placement.cluster_view import ClusterView
from router.placement.sanitize_report import build_node_view
from router.settings import RouterSettings
from tests.support.answers import CREATED
from tests.support.cluster.loopback_cluster import a_memory, a_model
from tests.support.requests import list_visible
from wire.frames import Report
from wire.identity import NodeId
from wire.report import EngineState, Model
from wire.units import GIB

LOADED = a_model("loaded", features=("tools", "logprobs", "sampling", "grammar"))
ON_DISK = a_model("on-disk", loaded=False, weights=3 * GIB, context=8192, features=(), fingerprint="")
BROKEN = a_model("broken", loaded=False, cause="no weights")


def view(*more: Model) -> ClusterView:
    """Return a view of two nodes, of which the second has no model loaded. The first one also has `more`."""
    held = (("a", (LOADED, ON_DISK, *more)), ("b", (ON_DISK, BROKEN)))
    return ClusterView(
        tuple(
            build_node_view(
                Report(0, a_memory(), EngineState("x", "ready"), known),
                node=NodeId(name),
                name=name,
                state="ready",
                reported_at=1.0,
            )
            for name, known in held
        )
    )


def test_openai_model_has_the_fields_of_other_servers():
    listed = json.loads(models.list_models(list_visible(view()), CREATED))
    assert listed["object"] == "list"
    loaded, on_disk = listed["data"]
    assert loaded == {
        "id": "loaded",
        "object": "model",
        "created": CREATED,
        "owned_by": "macpool",
        "type": "llm",
        "context_length": 4096,
        "max_model_len": 4096,
        "max_context_length": 4096,
        "loaded_context_length": 4096,
        "state": "loaded",
        "compatibility_type": "mlx",
        "size": GIB,
        "capabilities": ["tool_use"],
        "features": ["chat", "tools", "logprobs", "sampling", "grammar"],
        "supported_parameters": [
            "max_tokens",
            "stop",
            "seed",
            "temperature",
            "top_p",
            "tools",
            "tool_choice",
            "parallel_tool_calls",
            "logprobs",
            "top_logprobs",
            "top_k",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "logit_bias",
            "response_format",
            "structured_outputs",
        ],
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
        "meta": {"n_ctx_train": 4096, "size": GIB},
    }
    assert (on_disk["id"], on_disk["state"], on_disk["loaded_context_length"]) == ("on-disk", "not-loaded", None)
    assert (on_disk["size"], on_disk["max_context_length"], on_disk["capabilities"]) == (3 * GIB, 8192, [])
    one = models.get_model(list_visible(view()), "on-disk", CREATED)
    assert isinstance(one, bytes)
    assert json.loads(one) == on_disk


def test_a_model_in_anthropic_s_shape():
    found = json.loads(models.list_anthropic_models(list_visible(view()), CREATED))
    assert (found["first_id"], found["last_id"], found["has_more"]) == ("loaded", "on-disk", False)
    assert found["data"][0] == {
        "type": "model",
        "id": "loaded",
        "display_name": "loaded",
        "created_at": "2023-11-14T22:13:20Z",
        "lifecycle": "active",
        "max_input_tokens": 4096,
        "max_tokens": 4096,
    }
    assert json.loads(models.list_anthropic_models(list_visible(ClusterView()), CREATED)) == {
        "data": [],
        "has_more": False,
        "first_id": None,
        "last_id": None,
    }


def test_unloadable_model_is_not_listed_and_has_a_reason():
    for show in (models.get_model, models.get_anthropic_model):
        problem = show(list_visible(view()), "broken", CREATED)
        assert isinstance(problem, Problem)
        assert (problem.status, problem.code, problem.param) == (404, "model_not_found", "model")
        assert problem.message == "no node can load the model 'broken': no weights"


def test_ollama_s_tags_are_of_all_models_and_its_processes_of_the_loaded_ones():
    details = {
        "parent_model": "",
        "format": "mlx",
        "family": "",
        "families": [],
        "parameter_size": "",
        "quantization_level": "",
    }
    loaded, on_disk = json.loads(ollama_models.list_models(list_visible(view()), CREATED))["models"]
    row = {
        "name": "loaded",
        "model": "loaded",
        "size": GIB,
        "digest": hashlib.sha256(b"tiny-1").hexdigest(),
        "details": details,
    }
    assert loaded == row | {"modified_at": "2023-11-14T22:13:20Z"}
    assert on_disk["digest"] == hashlib.sha256(b"on-disk").hexdigest(), "without a fingerprint that of its name"
    (running,) = json.loads(ollama_models.list_loaded_models(view()))["models"]
    assert running == row | {"size_vram": GIB, "expires_at": "2300-01-01T00:00:00Z", "context_length": 4096}


def test_ollama_show_lists_capabilities():
    for body in (b'{"model": "loaded:latest"}', b'{"name": "loaded"}'):
        shown = ollama_models.show_model(list_visible(view()), body, CREATED)
        assert isinstance(shown, bytes)
        found = json.loads(shown)
        assert found["capabilities"] == ["completion", "tools"]
        assert found["model_info"] == {
            "general.architecture": "mlx",
            "general.basename": "loaded",
            "mlx.context_length": 4096,
        }
    deep = a_model("deep", features=("reasoning", "tools"))
    shown = ollama_models.show_model(list_visible(view(deep)), b'{"model": "deep"}', CREATED)
    assert isinstance(shown, bytes)
    assert json.loads(shown)["capabilities"] == ["completion", "tools", "thinking"]
    shown = ollama_models.show_model(list_visible(view()), b'{"model": "on-disk"}', CREATED)
    assert isinstance(shown, bytes)
    assert json.loads(shown)["capabilities"] == ["completion"]
    missing = ollama_models.show_model(list_visible(view()), b'{"model": "nothing"}', CREATED)
    assert isinstance(missing, Problem)
    assert (missing.status, missing.code) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("kind", "named", "output", "parameter"),
    [("embed", "embeddings", "embeddings", "dimensions"), ("rerank", "rerank", "rerank", "top_n")],
)
def test_a_model_that_writes_no_text_has_its_own_type_output_and_parameters(
    kind: str, named: str, output: str, parameter: str
):
    shown = json.loads(models.list_models(list_visible(view(a_model("other", features=(kind,)))), CREATED))
    (found,) = (row for row in shown["data"] if row["id"] == "other")
    assert (found["type"], found["architecture"]["output_modalities"], found["features"]) == (named, [output], [kind])
    assert parameter in found["supported_parameters"]
    assert "max_tokens" not in found["supported_parameters"]


@pytest.mark.parametrize(("kind", "capability"), [("embed", "embedding"), ("rerank", "rerank")])
def test_other_kinds_than_chat_have_one_capability(kind: str, capability: str):
    other = a_model("other", features=(kind,))
    shown = ollama_models.show_model(list_visible(view(other)), b'{"model": "other"}', CREATED)
    assert isinstance(shown, bytes)
    assert json.loads(shown)["capabilities"] == [capability]
    listed = {one["id"]: one for one in json.loads(models.list_models(list_visible(view(other)), CREATED))["data"]}
    assert listed["other"]["features"] == [kind]


def test_show_needs_a_name():
    for body, field in ((b"{}", "model"), (b'{"name": ""}', "name")):
        problem = ollama_models.show_model(list_visible(view()), body, CREATED)
        assert isinstance(problem, Problem)
        assert (problem.status, problem.param) == (400, field)


def test_ollama_version_is_the_emulated_one():
    assert json.loads(ollama_models.encode_version()) == {"version": ollama_models.OLLAMA_VERSION}


def test_aliases_are_listed_with_the_properties_of_their_first_candidate_that_a_node_serves():
    settings = RouterSettings(aliases={"best": ("missing", "on-disk", "loaded"), "none": ("missing",)})
    visible = list_visible(view(), settings)
    rows = {row["id"]: row for row in json.loads(models.list_models(visible, CREATED))["data"]}
    assert list(rows) == ["loaded", "on-disk", "best", "none"]
    assert rows["best"] == rows["on-disk"] | {
        "id": "best",
        "owned_by": "macpool-alias",
        "alias": {"candidates": ["missing", "on-disk", "loaded"]},
    }
    assert rows["none"] == {
        "id": "none",
        "object": "model",
        "created": CREATED,
        "owned_by": "macpool-alias",
        "alias": {"candidates": ["missing"]},
    }
    one = models.get_model(visible, "best", CREATED)
    assert isinstance(one, bytes)
    assert json.loads(one) == rows["best"]
    tags = json.loads(ollama_models.list_models(visible, CREATED))["models"]
    assert [tag["name"] for tag in tags] == ["loaded", "on-disk", "best"]
    listed = json.loads(models.list_anthropic_models(visible, CREATED))
    assert ([row["id"] for row in listed["data"]], listed["last_id"]) == (["loaded", "on-disk", "best"], "best")
    problem = models.get_anthropic_model(visible, "none", CREATED)
    assert isinstance(problem, Problem)
    assert (problem.status, problem.code) == (404, "model_not_found")


def test_a_key_for_an_alias_alone_sees_whether_its_model_is_loaded():
    settings = RouterSettings(aliases={"coder": ("loaded",), "large": ("on-disk",)})
    visible = list_visible(view(), settings, KeyLimits(models=("coder", "large")))
    rows = json.loads(models.list_models(visible, CREATED))["data"]
    assert [(row["id"], row["state"]) for row in rows] == [("coder", "loaded"), ("large", "not-loaded")]
