"""Files that serving needs."""

import pytest

from node.hub.prediction.file_selection import is_weight_file, select_files
from wire.models.files import ModelFile


def split(*paths: str) -> tuple[list[str], list[str]]:
    needed, skipped = select_files([ModelFile(path, 1, "a" * 64) for path in paths])
    return [file.path for file in needed], [file.path for file in skipped]


def test_select_files_skips_code_other_formats_and_pictures():
    needed, skipped = split(
        ".gitattributes",
        "._config.json",
        ".model.safetensors",
        "README.md",
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "consolidated.safetensors",
        "pytorch_model.bin",
        "model.Q4.gguf",
        "modeling_x.py",
        "picture.png",
        "original/model.safetensors",
        "onnx/config.json",
        "1_Pooling/config.json",
        "tokenizer.model",
        "chat_template.jinja",
        "merges.txt",
    )
    assert needed == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "1_Pooling/config.json",
        "tokenizer.model",
        "chat_template.jinja",
        "merges.txt",
    ]
    assert len(skipped) == 11


def test_select_files_keeps_other_safetensors_without_weights_of_the_usual_name():
    assert split("config.json", "weights.safetensors") == (["config.json", "weights.safetensors"], [])


@pytest.mark.parametrize(
    ("path", "is_weight"),
    [
        ("model.safetensors", True),
        ("model-00001-of-00002.safetensors", True),
        ("model-fp8/part.safetensors", False),
        ("original/model.safetensors", False),
        ("Model.safetensors", False),
        ("model.safetensors.index.json", False),
    ],
)
def test_only_files_next_to_the_config_are_weights(path: str, is_weight: bool):
    assert is_weight_file(path) == is_weight
