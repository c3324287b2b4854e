"""Write models for embeddings and rerank that the tests need: a tiny trained decoder with the files of
sentence-transformers."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests import models

MODULE = "sentence_transformers.models."
HIDDEN = 128
"""Features of the tiny models."""


def make_embedder(
    folder: Path,
    *,
    modes: Sequence[str] = ("pooling_mode_lasttoken",),
    dense: Sequence[tuple[int, str]] = (),
    normalize: bool = True,
    prompts: Mapping[str, str] | None = None,
    default_prompt: str | None = None,
    arch: str = "qwen3",
    seed: int = 7,
    **config: Any,
) -> Path:
    """Write an embedding model into a new folder: the layers of a tiny trained model, and its modules.

    `dense` are the outputs and the activation of each Dense layer, which is random by `seed`. `config` changes the
    config of the model. Weights are links to those of the tiny model.
    """
    _link_model(folder, arch, config)
    listed = [("Transformer", ""), ("Pooling", "1_Pooling")]
    write_json(folder / "1_Pooling/config.json", {"word_embedding_dimension": HIDDEN} | dict.fromkeys(modes, True))
    inputs = HIDDEN * len(modes)
    mx.random.seed(seed)
    for number, (outputs, activation) in enumerate(dense, 2):
        path = f"{number}_Dense"
        about = {"in_features": inputs, "out_features": outputs, "bias": True, "activation_function": activation}
        write_json(folder / path / "config.json", about)
        weights = {"linear.weight": mx.random.normal((outputs, inputs)), "linear.bias": mx.random.normal((outputs,))}
        mx.save_safetensors(str(folder / path / "model.safetensors"), weights)
        listed.append(("Dense", path))
        inputs = outputs
    if normalize:
        listed.append(("Normalize", f"{len(listed)}_Normalize"))
    rows = [{"idx": at, "name": str(at), "path": path, "type": MODULE + kind} for at, (kind, path) in enumerate(listed)]
    write_json(folder / "modules.json", rows)
    if prompts is not None:
        write_json(
            folder / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": default_prompt}
        )
    return folder


def _link_model(folder: Path, arch: str, config: Mapping[str, Any]) -> None:
    """Link the files of a tiny trained model into a new folder, with another config."""
    folder.mkdir(parents=True)
    source = models.path(arch)
    for file in source.iterdir():
        if file.name != "config.json":
            os.symlink(file, folder / file.name)
    settings = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | config))


TEMPLATE = (
    "{%- set first = messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first -%}"
    "{%- set second = messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first -%}"
    "Query: {{ first }}\nDocument: {{ second }}\nAnswer:"
)
"""Chat template with the roles of a reranker."""


def make_reranker(
    folder: Path,
    tokens: tuple[int, int | None] | None = (5, 9),
    template: str = TEMPLATE,
    arch: str = "qwen3",
    **config: Any,
) -> Path:
    """Write a decoder that scores documents into a new folder: a tiny trained model and its `tokens` for yes and no.

    `template` is the chat template. Without `tokens` or `template`, the model has the files of a chat model only.
    `config` changes the config of the model."""
    _link_model(folder, arch, config)
    if template:
        (folder / "chat_template.jinja").write_text(template)
    if tokens is not None:
        write_json(folder / "1_LogitScore/config.json", {"true_token_id": tokens[0], "false_token_id": tokens[1]})
        kinds = (("base.modules.transformer.Transformer", ""), ("cross_encoder.modules.LogitScore", "1_LogitScore"))
        write_json(
            folder / "modules.json",
            [{"path": path, "type": f"sentence_transformers.{kind}"} for kind, path in kinds],
        )
    return folder


def write_json(file: Path, content: object) -> None:
    """Write JSON into a file, whose folder is made if necessary."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))
