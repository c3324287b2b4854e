import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from node.models.catalogue import ModelCatalogue
from node.settings import ModelSettings
from node.video import packages

WAN = {
    "_class_name": "WanPipeline",
    "boundary_ratio": 0.875,
    "transformer": ["diffusers", "WanTransformer3DModel"],
    "transformer_2": ["diffusers", "WanTransformer3DModel"],
    "vae": ["diffusers", "AutoencoderKLWan"],
    "text_encoder": ["transformers", "UMT5EncoderModel"],
}


def weights(path: Path, size: int, metadata: dict[str, str] | None = None, held: int | None = None) -> None:
    header = json.dumps(
        {
            **({"__metadata__": metadata} if metadata else {}),
            "w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]},
        }
    ).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(size if held is None else held))


def package(folder: Path, index: dict[str, Any] = WAN, *, bits: int = 0, two: bool = True) -> Path:
    """Write a package like an engine that quantizes: without configs of its components."""
    folder.mkdir(parents=True)
    (folder / "model_index.json").write_text(json.dumps(index))
    metadata = {"quantization_level": str(bits), "mflux_version": "0.18.14"} if bits else None
    weights(folder / "transformer" / "0.safetensors", 700, metadata)
    weights(folder / "transformer" / "1.safetensors", 300, metadata)
    if two:
        weights(folder / "transformer_2" / "0.safetensors", 900, metadata)
    weights(folder / "vae" / "0.safetensors", 50)
    weights(folder / "text_encoder" / "0.safetensors", 40)
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text("{}")
    return folder


def found(top: Path) -> dict[str, packages.Package]:
    return packages.find_packages((str(top),), None)


def test_of_packages_with_equal_names_the_one_in_the_first_folder_is_used(tmp_path: Path):
    first, second = (package(tmp_path / name / "wan") for name in "ab")
    folders = (str(tmp_path / "a"), str(tmp_path / "b"))
    assert packages.find_packages(folders, None)["wan"].folder == first
    assert packages.find_packages(folders[::-1], None)["wan"].folder == second


def test_a_package_without_configs_of_its_components_is_one_video_model(tmp_path: Path):
    package(tmp_path / "publisher" / "wan", bits=8)
    one = found(tmp_path)["publisher/wan"].described
    assert (one.bits, one.weights, one.expert, one.experts, one.cause) == (8, 1990, 1000, 2, "")
    assert (one.pipeline, one.token_side, one.token_frames) == ("WanPipeline", 16, 4)
    assert (one.fps, one.steps, one.frames) == (16, 40, 81)
    assert len(one.fingerprint) == 32
    library = ModelCatalogue(ModelSettings(folders=(str(tmp_path),), use_huggingface_cache=False))
    library.scan()
    assert "publisher/wan" not in library.get_models(), "and no chat model"


def test_no_component_is_taken_for_a_package(tmp_path: Path):
    folder = package(tmp_path / "wan")
    (folder / "transformer" / "config.json").write_text('{"model_type": "llama"}')
    (folder / "transformer" / "model_index.json").write_text(json.dumps(WAN))
    assert set(found(tmp_path)) == {"wan"}


@pytest.mark.parametrize(
    "index",
    [
        {**WAN, "_class_name": "FluxPipeline"},
        {"transformer": []},
        {**WAN, "_class_name": ["WanPipeline"]},
        [1],
    ],
)
def test_other_pipelines_are_ignored(tmp_path: Path, index: Any):
    package(tmp_path / "other", index)
    assert found(tmp_path) == {}


def test_what_is_no_json_is_no_package(tmp_path: Path):
    (package(tmp_path / "broken") / "model_index.json").write_text("{")
    assert found(tmp_path) == {}


def test_a_component_that_is_named_as_nothing_is_not_missed_and_one_that_is_named_is(tmp_path: Path):
    package(tmp_path / "one", {**WAN, "transformer_2": [None, None]}, two=False)
    package(tmp_path / "two", two=False)
    one, two = (found(tmp_path)[name].described for name in ("one", "two"))
    assert (one.cause, one.experts, one.token_side, one.fps) == ("", 1, 32, 24)
    assert two.cause == "it has no transformer_2: download it again"


def test_a_config_overrides_the_default_shape(tmp_path: Path):
    folder = package(tmp_path / "wan", two=False, index={**WAN, "transformer_2": None})
    (folder / "vae" / "config.json").write_text('{"scale_factor_spatial": 8, "scale_factor_temporal": 4}')
    assert found(tmp_path)["wan"].described.token_side == 16


def test_weights_that_are_not_whole_are_named(tmp_path: Path):
    folder = package(tmp_path / "wan")
    weights(folder / "transformer_2" / "0.safetensors", 900, held=100)
    cause = found(tmp_path)["wan"].described.cause
    assert cause.startswith("transformer_2: 0.safetensors: the file is incomplete")


def test_files_of_macos_beside_the_weights_are_ignored(tmp_path: Path):
    folder = package(tmp_path / "wan")
    before = found(tmp_path)["wan"].described
    (folder / "vae" / "._0.safetensors").write_bytes(b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X")
    assert found(tmp_path)["wan"].described == before


def test_other_weights_are_another_fingerprint(tmp_path: Path):
    folder = package(tmp_path / "wan")
    first = found(tmp_path)["wan"].described.fingerprint
    assert found(tmp_path)["wan"].described.fingerprint == first
    weights(folder / "vae" / "0.safetensors", 51)
    assert found(tmp_path)["wan"].described.fingerprint != first


def test_a_package_in_the_cache_of_downloads_is_found(tmp_path: Path):
    package(tmp_path / "models--pub--wan" / "snapshots" / "abc")
    (tmp_path / "models--pub--wan" / "refs").mkdir()
    (tmp_path / "models--pub--wan" / "refs" / "main").write_text("abc")
    assert set(packages.find_packages((), tmp_path)) == {"pub/wan"}


def test_a_package_with_one_expert_has_its_own_shape(tmp_path: Path):
    package(tmp_path / "wan", {**WAN, "transformer_2": [None, None]}, two=False, bits=4)
    one = found(tmp_path)["wan"].described
    assert (one.bits, one.expert, one.experts, one.cause) == (4, 1000, 1, "")
    assert (one.fps, one.steps, one.frames) == (24, 50, 121)


def test_a_package_has_the_bits_of_its_widest_expert(tmp_path: Path):
    folder = package(tmp_path / "wan", bits=8)
    weights(folder / "transformer_2" / "0.safetensors", 900, {"quantization_level": "4", "mflux_version": "0.18.14"})
    assert found(tmp_path)["wan"].described.bits == 8


def test_a_package_without_experts_is_named_with_its_cause(tmp_path: Path):
    folder = package(tmp_path / "wan")
    for part in ("transformer", "transformer_2"):
        shutil.rmtree(folder / part)
    one = found(tmp_path)["wan"].described
    assert (one.bits, one.expert, one.experts) == (0, 0, 1)
    assert "transformer" in one.cause


def test_the_order_of_an_index_does_not_change_the_fingerprint(tmp_path: Path):
    package(tmp_path / "one")
    package(tmp_path / "other", dict(reversed(WAN.items())))
    one, other = (found(tmp_path)[name].described for name in ("one", "other"))
    assert one.fingerprint == other.fingerprint


def test_a_folder_without_an_index_or_with_endless_brackets_is_no_package(tmp_path: Path):
    assert packages.describe_package("wan", tmp_path) is None
    (tmp_path / "model_index.json").write_text("[" * 100_000)
    assert packages.describe_package("wan", tmp_path) is None
