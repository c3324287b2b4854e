"""The query of the hub as a process: predictions before anything is downloaded, and one sentence for each refusal."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from node.models.catalogue import EMBEDDED, describe_folder
from tests.effort import thin_cases
from tests.support.engine.embedders import make_embedder, make_reranker
from tests.support.engine.encoders import make_encoder
from tests.support.hub.hub import Answer, Hub, running_hub
from tests.support.processes import ROOT, environment
from wire.models.hub_query import HubAnswer

pytestmark = pytest.mark.slow

REPO = "tests/tiny"
TOKEN = "hf_secretsecretsecretsecret"
FILES = {path.name: path.read_bytes() for path in EMBEDDED.iterdir() if path.is_file() and path.suffix != ".md"}
CONFIG = json.loads(FILES["config.json"])


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as made:
        made.add(REPO, FILES)
        yield made


def query(hub: Hub, **fields: Any) -> dict[str, Any]:
    """Run a query and return its answer; check that the answer has no token."""
    document = json.dumps({"endpoint": hub.url, "repo": REPO, "token": TOKEN, **fields})
    child = subprocess.run(
        [sys.executable, "-m", "node.hub.query"],
        input=document.encode(),
        capture_output=True,
        env=environment(),
        cwd=ROOT,
        timeout=60,
        check=True,
    )
    assert b"secret" not in child.stdout + child.stderr
    return json.loads(child.stdout)


def change_config(hub: Hub, drop: tuple[str, ...] = (), files: dict[str, bytes] | None = None, **config: Any) -> None:
    """Add a commit with another config and other files."""
    kept = {name: content for name, content in FILES.items() if name not in drop}
    hub.add(REPO, {**kept, **(files or {}), "config.json": json.dumps({**CONFIG, **config}).encode()})


def test_a_query_predicts_the_description_of_the_catalogue(hub: Hub):
    hub.add(REPO, {**FILES, "README.md": bytes(1000), "modeling.py": b"x", "original/model.safetensors": bytes(5000)})
    raw = query(hub)
    answer = msgspec.convert(raw, HubAnswer)
    described = describe_folder(REPO, EMBEDDED)
    assert described is not None
    model = answer.model
    assert (model.weights, model.stored, model.context) == (described.weights, described.stored, described.context)
    assert (model.kv, model.transient, model.cause) == (described.kv, described.forward, "")
    assert model.architecture == "llama"
    assert {file.path for file in answer.manifest.files} == FILES.keys()
    assert {file.path: file.size for file in answer.skipped} == {
        "README.md": 1000,
        "modeling.py": 1,
        "original/model.safetensors": 5000,
    }
    assert hub.count_bytes() < len(FILES["model.safetensors"]) / 4
    assert {request.authorization for request in hub.requests} == {f"Bearer {TOKEN}"}


def test_the_manifest_has_the_digests_of_the_hub(hub: Hub):
    manifest = msgspec.convert(query(hub, token=""), HubAnswer).manifest
    expected = hub.add(REPO, FILES)
    assert manifest.commit == expected.commit
    assert {(file.path, file.size, file.etag) for file in manifest.files} == {
        (file.path, file.size, file.etag) for file in expected.files
    }
    assert {request.authorization for request in hub.requests} == {""}


CAUSES: tuple[tuple[dict[str, Any], str], ...] = (
    ({"drop": ("model.safetensors",), "files": {"model.Q4.gguf": b"x"}}, "GGUF only"),
    ({"model_type": "unheard_of", "auto_map": {"AutoModel": "x.py"}}, "trust_remote_code"),
    ({"drop": ("model.safetensors",), "files": {"pytorch_model.bin": b"x"}}, "no safetensors"),
    ({"model_type": "unheard_of"}, "'unheard_of' is not supported"),
    ({"model_file": "model.py"}, "which Macpool never runs"),
    ({"architectures": ["CLIPModel"]}, "not a text model"),
    (
        {
            "drop": ("tokenizer.json",),
            "files": {"tokenizer_config.json": b'{"auto_map": {"AutoTokenizer": ["x.py", null]}}'},
        },
        "its tokenizer needs code",
    ),
    ({"files": {"model.safetensors": b"\xff" * 100}}, "not a safetensors file"),
    ({"files": {"model.safetensors.index.json": b'{"weight_map": {"a": "model-2.safetensors"}}'}}, "are missing"),
)


@pytest.mark.parametrize(("change", "cause"), thin_cases(CAUSES, 4, kept=2))
def test_a_model_that_cannot_be_served_is_named_with_its_cause(hub: Hub, change: dict[str, Any], cause: str):
    change_config(hub, **change)
    assert cause in query(hub)["model"]["cause"]


def test_the_output_has_nothing_but_the_answer(hub: Hub):
    hub.add(REPO, {**FILES, "config.json": b'{"model_type": "unheard_of"}'})
    assert "'unheard_of' is not supported" in query(hub)["model"]["cause"], "although its dimensions are unknown, a log"


def test_supported_architectures_may_name_code_that_is_not_run(hub: Hub):
    change_config(hub, auto_map={"AutoModelForCausalLM": "modeling.py"}, model_type="mistral")
    assert query(hub)["model"]["cause"] == ""


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the files of a model folder by their paths."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


KINDS = ("bert", "reranker", "xlm-roberta", "modernbert", "cross-encoder", "embedder")


@pytest.mark.parametrize("kind", thin_cases(KINDS, 4, kept=2))
def test_models_for_embeddings_and_rerank_can_be_pulled(hub: Hub, tmp_path: Path, kind: str):
    folder = tmp_path / "model"
    if kind == "embedder":
        make_embedder(folder, dense=((24, "torch.nn.modules.activation.Tanh"),))
    elif kind == "reranker":
        make_reranker(folder)
    else:
        make_encoder(folder, "bert" if kind == "cross-encoder" else kind, classifier=kind == "cross-encoder")
    files = read_files(folder)
    hub.add(REPO, files)
    answer = msgspec.convert(query(hub), HubAnswer)
    described = describe_folder(REPO, folder)
    assert described is not None
    assert (answer.model.cause, answer.model.weights) == ("", described.weights)
    assert {file.path for file in answer.manifest.files} >= {path for path in files if path.endswith("json")}


def test_an_encoder_of_an_unknown_type_is_named_with_the_known_ones(hub: Hub, tmp_path: Path):
    make_encoder(tmp_path / "model", "bert", {"model_type": "deberta-v2"})
    hub.add(REPO, read_files(tmp_path / "model"))
    assert "an encoder of the type deberta-v2: known are bert" in query(hub)["model"]["cause"]


def test_a_repository_without_a_config_is_answered(hub: Hub):
    hub.add(REPO, {"model.gguf": b"x"})
    answer = query(hub)
    assert "GGUF only" in answer["model"]["cause"]
    assert answer["manifest"][2] == []


REFUSALS = (
    (Answer("/api/", 404, {"x-error-code": "RepoNotFound"}, 9), "not_found", "does not exist"),
    (Answer("/api/", 429, {"ratelimit": '"api";r=0;t=250'}, 9), "rate_limited", "for 250 s"),
    (Answer("/api/", 404, {"x-error-code": "RevisionNotFound"}, 9), "not_found", "at revision v9"),
    (Answer("/api/", 401, {"x-error-code": "GatedRepo"}, 9), "gated", "is gated"),
    (Answer("resolve", 403, {"x-error-code": "GatedRepo"}, 99), "gated", "accept its terms"),
    (Answer("/api/", 500, {}, 99), "source_lost", "answered 500"),
)


@pytest.mark.parametrize(("answer", "code", "text"), thin_cases(REFUSALS, 4, kept=2))
def test_refusals_are_one_sentence(hub: Hub, answer: Answer, code: str, text: str):
    hub.faults.answers = [answer]
    found = query(hub, revision="v9" if answer.status == 404 else "")
    assert found["code"] == code
    assert text in found["message"]
    assert found["retry_after"] == (250.0 if code == "rate_limited" else 0.0)


def test_a_first_rate_limit_is_waited_for(hub: Hub):
    hub.faults.answers = [Answer("/api/", 429, {"retry-after": "1"}), Answer("resolve", 429, {"retry-after": "1"})]
    began = time.monotonic()
    assert query(hub)["model"]["cause"] == ""
    assert time.monotonic() - began >= 1.9


def test_a_query_is_bounded_in_time(hub: Hub):
    hub.faults.chunk_seconds = 5.0
    began = time.monotonic()
    found = query(hub, timeout_seconds=1.5)
    assert (found["code"], "within 2 s" in found["message"]) == ("source_lost", True)
    assert time.monotonic() - began < 8


def test_an_unreachable_hub_is_named(hub: Hub):
    found = query(hub, endpoint="http://127.0.0.1:9", timeout_seconds=4)
    assert found["code"] == "source_lost"


@pytest.mark.parametrize("fields", [{"repo": "no-publisher"}, {"repo": "a/../b"}, {"repo": 5}])
def test_invalid_queries_are_refused(hub: Hub, fields: dict[str, Any]):
    assert query(hub, **fields)["code"] == "invalid"
    assert hub.requests == []


def test_names_that_leave_the_folder_are_refused(hub: Hub):
    hub.add(REPO, {**FILES, "1_Pooling/config.json": b"{}", "model..\\x.safetensors": b"x"})
    assert query(hub)["code"] == "invalid"


def test_links_to_other_hosts_are_not_followed(hub: Hub):
    hub.faults.link = "https://127.0.0.1:9/next"
    assert query(hub)["model"]["cause"] == ""
