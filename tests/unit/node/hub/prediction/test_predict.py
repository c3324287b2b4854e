"""Predictions from the small files of a repository: the reason why a model could not be served."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from node.hub.prediction.predict import predict_model
from node.models.catalogue import EMBEDDED, describe_folder
from tests.models import EMBEDDED as FOLDER
from wire.models.files import ModelFile, ModelManifest
from wire.models.hub_query import ModelPrediction

NEVER = "needs code from the repository (trust_remote_code), which is never run"


class Repository:
    """The small files of the embedded model, and the paths of all files of its repository."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "model"
        shutil.copytree(FOLDER, self.folder)
        self.names = [path.name for path in self.folder.iterdir() if path.is_file()]

    def change(self, file: str = "config.json", **fields: Any) -> None:
        path = self.folder / file
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    def drop(self, *names: str) -> None:
        for name in names:
            (self.folder / name).unlink()
            self.names.remove(name)

    def predict(self, *others: str) -> ModelPrediction:
        manifest = ModelManifest("a/b", "c" * 40, tuple(ModelFile(name, 1, "a" * 64) for name in self.names))
        return predict_model("a/b", self.folder, manifest, [*self.names, *others])


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def test_a_prediction_is_the_description_of_the_catalogue(repository: Repository):
    described = describe_folder(EMBEDDED.name, repository.folder)
    assert described is not None
    found = repository.predict("README.md", "model.gguf")
    assert (found.cause, found.architecture, found.quantization) == ("", "llama", described.quantization)
    assert (found.weights, found.stored, found.context) == (described.weights, described.stored, described.context)
    assert (found.kv, found.transient) == (described.kv, described.forward)


def test_weights_in_fp8_take_twice_their_size_on_the_disk(repository: Repository):
    header = json.dumps({"w": {"dtype": "F8_E4M3", "shape": [64, 64], "data_offsets": [0, 4096]}}).encode()
    weights = len(header).to_bytes(8, "little") + header + bytes(4096)
    (repository.folder / "model.safetensors").write_bytes(weights)
    found = repository.predict()
    assert (found.weights, found.stored) == (2 * 4096, 4096)


def test_an_encoder_needs_no_architecture_of_mlx_lm(repository: Repository):
    (repository.folder / "modules.json").write_text("[]")
    repository.change(architectures=["ElectraModel"], model_type="electra")
    described = describe_folder(EMBEDDED.name, repository.folder)
    assert described is not None
    found = repository.predict()
    assert (found.architecture, found.cause) == ("electra", described.cause)
    assert "mlx-lm" not in found.cause


def test_a_config_that_was_too_large_to_be_read_is_named(repository: Repository):
    (repository.folder / "config.json").unlink()
    assert repository.predict() == ModelPrediction(cause="its config.json is too large to be read")


def test_an_architecture_without_support_is_named(repository: Repository):
    repository.change(model_type="unheard_of")
    assert repository.predict().cause == "its architecture 'unheard_of' is not supported by this version of mlx-lm"
    repository.change(auto_map={"AutoModel": "x.py"})
    found = repository.predict()
    assert (found.architecture, found.cause) == ("unheard_of", f"its architecture 'unheard_of' {NEVER}")


def test_code_of_a_supported_architecture_is_not_needed(repository: Repository):
    repository.change(auto_map={"AutoModelForCausalLM": "x.py"})
    assert repository.predict().cause == ""


def test_a_tokenizer_with_code_needs_a_file_of_its_own(repository: Repository):
    repository.change("tokenizer_config.json", auto_map={"AutoTokenizer": ["x.py", None]})
    assert repository.predict().cause == ""
    repository.drop("tokenizer.json")
    assert repository.predict().cause == f"its tokenizer {NEVER}"


def test_a_model_of_another_kind_is_named(repository: Repository):
    repository.change(architectures=["CLIPModel"], model_type="clip")
    found = repository.predict()
    assert (found.architecture, found.weights) == ("clip", 0)
    assert found.cause == "it is not a text model: its config.json names no causal language model"


@pytest.mark.parametrize(
    ("other", "cause"),
    [
        ("model.Q4.gguf", "it has weights in GGUF only, the format of llama.cpp: pull its MLX or safetensors build"),
        ("pytorch_model.bin", "it has no safetensors weights: pull its MLX or safetensors build"),
    ],
)
def test_weights_of_another_format_are_named(repository: Repository, other: str, cause: str):
    repository.drop("model.safetensors")
    assert repository.predict(other).cause == cause


@pytest.mark.parametrize(
    ("other", "cause"),
    [
        ("model.gguf", "it has weights in GGUF only, the format of llama.cpp: pull its MLX or safetensors build"),
        ("README.md", "it has no config.json, and is not a model in the format of Hugging Face"),
    ],
)
def test_a_repository_without_a_config_is_named(repository: Repository, other: str, cause: str):
    repository.drop("config.json")
    assert repository.predict(other) == ModelPrediction(cause=cause)
