"""Files of sentence-transformers: the layouts that are followed, and those that are refused with the reason."""

import json
from pathlib import Path
from typing import Any

import pytest

from node.models.catalogue import ModelCatalogue, describe_folder
from node.models.embedding_files import MAX_FILE_BYTES, EmbeddingFilesError, read_embedding_layout
from node.models.embedding_layout import Activation, EmbeddingLayout, Pooling
from node.settings import ModelSettings, NodeSettings
from node.settings.node import check_settings
from tests.support.engine.embedders import HIDDEN, MODULE, make_embedder, write_json
from wire.models.kind import ModelKind

TANH = "torch.nn.modules.activation.Tanh"


def test_the_files_of_a_model_are_followed(tmp_path: Path):
    folder = make_embedder(
        tmp_path / "e",
        modes=("pooling_mode_mean_tokens", "pooling_mode_cls_token"),
        dense=((8, TANH),),
        prompts={"query": "q: ", "document": ""},
        default_prompt="query",
        is_matryoshka=True,
    )
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 512})
    layout = read_embedding_layout(folder, json.loads((folder / "config.json").read_text()))
    (dense,) = layout.dense
    assert layout.poolings == (Pooling.CLS, Pooling.MEAN)
    assert (dense.inputs, dense.outputs, dense.bias, dense.activation) == (256, 8, True, Activation.TANH)
    assert (layout.prompts, layout.default_prompt) == ({"query": "q: ", "document": ""}, "query")
    assert (layout.normalize, layout.max_tokens, layout.can_shorten, layout.lengths) == (True, 512, True, ())
    found = describe_folder("e", folder)
    assert found is not None
    assert (found.kind, found.context, found.layout, found.cause) == (ModelKind.EMBED, 512, layout, "")


def test_a_bare_pooling_file_is_enough(tmp_path: Path):
    folder = make_embedder(tmp_path / "e", modes=("pooling_mode_weightedmean_tokens",))
    (folder / "modules.json").unlink()
    assert read_embedding_layout(folder, {}) == EmbeddingLayout((Pooling.WEIGHTED_MEAN,), normalize=False)
    write_json(folder / "1_Pooling/config.json", {"pooling_mode": ["lasttoken", "max"]})
    assert read_embedding_layout(folder, {}).poolings == (Pooling.LAST, Pooling.MAX)


def modules(*kinds: tuple[str, str]) -> list[dict[str, str]]:
    return [{"type": MODULE + kind, "path": path} for kind, path in kinds]


BEGIN = (("Transformer", ""), ("Pooling", "1_Pooling"))
BROKEN: list[tuple[str, Any, str]] = [
    ("modules.json", modules(*BEGIN, ("LayerNorm", "2_LayerNorm")), "LayerNorm"),
    ("modules.json", modules(*BEGIN, ("Normalize", "2"), ("Dense", "2_Dense")), "in this order"),
    ("modules.json", modules(("Transformer", "../other"), BEGIN[1]), "../other"),
    ("modules.json", modules(BEGIN[0], ("Pooling", "/etc")), "/etc"),
    ("modules.json", modules(*BEGIN, ("Dense", "../2_Dense")), "known are 2_Dense"),
    ("modules.json", modules(*BEGIN, ("Dense", "2_Dense")), "lack 2_Dense"),
    ("modules.json", modules(*BEGIN) * 1000, "2 to 6 modules"),
    ("modules.json", {"a": 1}, "without a list"),
    ("modules.json", ["x", "y"], "list the modules"),
    ("1_Pooling/config.json", {"pooling_mode_attention": True}, "pooling_mode_attention"),
    ("1_Pooling/config.json", {"pooling_mode": "attention"}, "attention"),
    ("1_Pooling/config.json", {"pooling_mode_mean_tokens": False}, "choose no pooling"),
    ("1_Pooling/config.json", {"pooling_mode_mean_tokens": True, "include_prompt": False}, "prompt"),
    ("1_Pooling/config.json", {"pooling_mode": "mean", "include_prompt": False}, "exclude the prompt"),
    ("1_Pooling/config.json", [], "not a JSON object"),
    ("config_sentence_transformers.json", {"prompts": {"query": 1}}, "not a text"),
    ("config_sentence_transformers.json", {"prompts": {}, "default_prompt_name": "query"}, "default prompt"),
    ("config_sentence_transformers.json", {"prompts": {str(n): "" for n in range(65)}}, "64"),
]


@pytest.mark.parametrize(("file", "content", "reason"), BROKEN)
def test_what_cannot_be_followed_is_the_reason(tmp_path: Path, file: str, content: Any, reason: str):
    folder = make_embedder(tmp_path / "e")
    write_json(folder / file, content)
    with pytest.raises(EmbeddingFilesError, match=reason):
        read_embedding_layout(folder, {})
    found = describe_folder("e", folder)
    assert found is not None
    assert reason in found.cause
    assert found.kind is ModelKind.EMBED


def test_hostile_sizes_are_refused(tmp_path: Path):
    folder = make_embedder(tmp_path / "e", dense=((8, TANH),))
    (folder / "modules.json").write_text("[" * (MAX_FILE_BYTES + 1))
    with pytest.raises(EmbeddingFilesError, match="more than"):
        read_embedding_layout(folder, {})
    (folder / "modules.json").write_text("[" * 100_000)
    with pytest.raises(EmbeddingFilesError, match="not JSON"):
        read_embedding_layout(folder, {})


@pytest.mark.parametrize("change", [{"in_features": 2**62}, {"out_features": -1}, {"activation_function": "os.system"}])
def test_a_dense_layer_must_have_the_shape_of_its_weights(tmp_path: Path, change: dict[str, Any]):
    folder = make_embedder(tmp_path / "e", dense=((8, TANH),))
    file = folder / "2_Dense/config.json"
    write_json(file, json.loads(file.read_text()) | change)
    with pytest.raises(EmbeddingFilesError):
        read_embedding_layout(folder, {})


def test_other_modules_are_another_model(tmp_path: Path):
    modes = ("pooling_mode_lasttoken", "pooling_mode_mean_tokens")
    folders = [make_embedder(tmp_path / mode, modes=(mode,)) for mode in modes]
    folders += [make_embedder(tmp_path / str(seed), dense=((8, TANH),), seed=seed) for seed in (1, 2)]
    found = [describe_folder("e", folder) for folder in folders]
    assert len({one.fingerprint for one in found if one is not None}) == 4


def test_an_unknown_encoder_is_listed_with_the_reason(tmp_path: Path):
    folder = make_embedder(tmp_path / "e", model_type="nomic_bert", architectures=["NomicBertModel"])
    found = describe_folder("e", folder)
    assert found is not None
    assert "an encoder of the type nomic_bert: known are bert, roberta, xlm-roberta, modernbert" in found.cause


def test_the_layers_of_a_decoder_without_its_output_are_a_model(tmp_path: Path):
    folder = make_embedder(tmp_path / "e", architectures=["Qwen3Model"])
    found = describe_folder("e", folder)
    assert found is not None
    assert (found.kind, found.cause) == (ModelKind.EMBED, "")
    for file in ("modules.json", "1_Pooling/config.json"):
        (folder / file).unlink()
    assert describe_folder("e", folder) is None


def test_a_setting_names_the_kind(tmp_path: Path):
    make_embedder(tmp_path / "e")
    settings = ModelSettings(folders=(str(tmp_path),), use_huggingface_cache=False, kinds=("e=chat",))
    catalogue = ModelCatalogue(settings)
    catalogue.scan()
    found = catalogue.find("e")
    assert found is not None
    assert found.kind is ModelKind.CHAT


@pytest.mark.parametrize("entry", ["e", "e=video", "=embed", "a/../b\0=chat"])
def test_a_setting_without_a_name_or_a_kind_is_refused(entry: str):
    with pytest.raises(ValueError, match=r"models\.kinds"):
        check_settings(NodeSettings(models=ModelSettings(kinds=(entry,))))


@pytest.mark.parametrize(
    ("name", "kind", "can"),
    [
        ("mlx-community/Qwen3-Embedding-0.6B-8bit", "qwen3", True),
        ("my-embedder", "qwen3", False),
        ("qwen3-embedding", "llama", False),
    ],
)
def test_vectors_of_a_known_family_may_be_cut(tmp_path: Path, name: str, kind: str, can: bool):
    found = describe_folder(name, make_embedder(tmp_path / "e", model_type=kind))
    assert found is not None
    assert found.layout is not None
    assert found.layout.can_shorten is can


def test_without_files_the_last_state_is_normalized_and_a_list_of_modules_needs_its_pooling(tmp_path: Path):
    folder = make_embedder(tmp_path / "e")
    (folder / "1_Pooling/config.json").unlink()
    with pytest.raises(EmbeddingFilesError, match="choose no pooling"):
        read_embedding_layout(folder, {})
    (folder / "modules.json").unlink()
    assert read_embedding_layout(folder, {}) == EmbeddingLayout((Pooling.LAST,), normalize=True)


@pytest.mark.parametrize(
    ("sizes", "lengths"), [([64, 32, True, 0, -8, "16", 1], (1, 32, 64)), ([], ()), ("64", ()), (None, ())]
)
def test_the_lengths_of_shorter_vectors_are_the_counts_of_the_config(
    tmp_path: Path, sizes: object, lengths: tuple[int, ...]
):
    layout = read_embedding_layout(tmp_path, {"matryoshka_dimensions": sizes})
    assert (layout.lengths, layout.can_shorten) == (lengths, bool(lengths))


def test_as_many_modules_and_bytes_as_allowed_are_followed(tmp_path: Path):
    folder = make_embedder(tmp_path / "e", dense=((8, TANH), (6, TANH), (4, TANH)))
    file = folder / "modules.json"
    file.write_text(file.read_text().ljust(MAX_FILE_BYTES))
    layout = read_embedding_layout(folder, {})
    assert ([dense.outputs for dense in layout.dense], layout.normalize) == ([8, 6, 4], True)


def test_dense_layers_count_as_weights_and_a_length_can_only_shorten_the_context(tmp_path: Path):
    plain = describe_folder("p", make_embedder(tmp_path / "p"))
    folder = make_embedder(tmp_path / "e", dense=((8, TANH),))
    dense = describe_folder("e", folder)
    assert plain is not None
    assert dense is not None
    size = 4 * (8 * HIDDEN + 8)
    assert (dense.weights - plain.weights, dense.stored - plain.stored) == (size, size)
    for length, context in ((100, 100), (10**6, plain.context)):
        write_json(folder / "sentence_bert_config.json", {"max_seq_length": length})
        found = describe_folder("e", folder)
        assert found is not None
        assert found.context == context


def test_a_dense_layer_has_a_bias_and_tanh_unless_its_config_says_otherwise(tmp_path: Path):
    folder = make_embedder(tmp_path / "e", dense=((8, TANH), (4, TANH)))
    write_json(folder / "2_Dense/config.json", {"in_features": 128, "out_features": 8})
    identity = {"bias": False, "activation_function": "torch.nn.modules.linear.Identity"}
    write_json(folder / "3_Dense/config.json", {"in_features": 8, "out_features": 4, **identity})
    layers = read_embedding_layout(folder, {}).dense
    assert [(layer.file, layer.bias, layer.activation) for layer in layers] == [
        ("2_Dense/model.safetensors", True, Activation.TANH),
        ("3_Dense/model.safetensors", False, Activation.IDENTITY),
    ]


@pytest.mark.parametrize("shape", [[0, 128], [8, 0], [True, 128]])
def test_a_dense_layer_without_numbers_is_refused(tmp_path: Path, shape: list[int]):
    folder = make_embedder(tmp_path / "e", dense=((8, TANH),))
    header = json.dumps({"linear.weight": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    (folder / "2_Dense/model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    write_json(folder / "2_Dense/config.json", {"in_features": shape[1], "out_features": shape[0]})
    with pytest.raises(EmbeddingFilesError, match="weights of the shape"):
        read_embedding_layout(folder, {})
