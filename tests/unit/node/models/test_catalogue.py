"""Models are found in their folders and described without loading; a broken model has a reason."""

import errno
import json
import os
import shutil
import struct
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from node.hub.digests import DigestStore, find_content, hash_file, list_content_files
from node.models import catalogue
from node.models.catalogue import (
    EMBEDDED,
    SCAN_INTERVAL_SECONDS,
    SCAN_VALID_SECONDS,
    ModelCatalogue,
    describe_folder,
)
from node.models.folders import MAX_DEPTH, find_model_folders, find_snapshots, get_hub_folder, use_hub_folder
from node.models.identity_files import IDENTITY_FILES
from node.models.memory_prediction import find_unknown_dimensions, name_quantization, predict_kv, predict_transient
from node.models.weight_files import read_header
from node.settings import ModelSettings
from tests import models
from tests.support.processes import until
from tests.support.readings import Later
from wire.capacity.arithmetic import estimate_prefill_transient
from wire.models.version import ModelVersion
from wire.report import KvParameters, TransientModel
from wire.units import GIB

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}


def safetensors(*extents: tuple[str, int]) -> bytes:
    """Return a file of tensors, each with this type and number of bytes, which count up."""
    at, header = 0, dict[str, Any](__metadata__={"format": "mlx"})
    for number, (dtype, size) in enumerate(extents):
        header[f"w{number}"] = {"dtype": dtype, "shape": [size], "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + bytes(number // 64 % 251 for number in range(at))


def tensors(size: int = 64, dtype: str = "F32", **metadata: str) -> bytes:
    header = json.dumps(
        {"__metadata__": metadata, "w": {"dtype": dtype, "shape": [size // 4], "data_offsets": [0, size]}}
    ).encode()
    return struct.pack("<Q", len(header)) + header + b"\0" * size


def model(folder: Path, config: dict[str, Any] = LLAMA, weights: bytes | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(tensors() if weights is None else weights)
    return folder


def library(*folders: Path, **environment: str) -> ModelCatalogue:
    settings = ModelSettings(folders=tuple(map(str, folders)), use_huggingface_cache=bool(environment))
    made = ModelCatalogue(settings, environment)
    made.scan()
    return made


def test_models_are_named_by_where_they_lie(tmp_path: Path):
    model(tmp_path / "publisher" / "one-4bit")
    model(tmp_path / "two")
    model(tmp_path.joinpath(*"deeper") / "lost")
    assert set(library(tmp_path).get_models()) == {"publisher/one-4bit", "two"}
    assert MAX_DEPTH == 3
    assert set(library(tmp_path / "two").get_models()) == {"two"}, "a configured folder may be a model itself"


def test_the_first_of_two_with_one_name_is_served(tmp_path: Path):
    first = model(tmp_path / "a" / "m")
    model(tmp_path / "b" / "m", {**LLAMA, "hidden_size": 128})
    model(tmp_path / "b" / "other")
    both = library(tmp_path / "a", tmp_path / "b")
    found = both.find("m")
    assert found is not None
    assert found.folder == first
    assert list(both.get_models()) == ["m", "other"], "models have the order of their folders"


def test_a_diffusers_package_and_its_parts_are_never_text(tmp_path: Path):
    model(tmp_path / "wan" / "text_encoder")
    (tmp_path / "wan" / "model_index.json").write_text("{}")
    assert list(find_model_folders(tmp_path)) == []


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["BertModel"], "model_type": "bert"},
        {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]},
        {"hidden_size": 3},
    ],
)
def test_what_writes_no_text_is_left_out(tmp_path: Path, config: dict[str, Any]):
    assert describe_folder("m", model(tmp_path / "m", config)) is None


def test_a_model_that_sees_and_writes_is_text(tmp_path: Path):
    config = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": LLAMA}
    found = describe_folder("m", model(tmp_path / "m", config))
    assert found is not None
    assert (found.context, found.kv.per_token) == (2048, 2 * 2 * 16 * 2 * 4)


def test_a_model_is_described(tmp_path: Path):
    found = describe_folder("m", model(tmp_path / "m", weights=tensors(4096)))
    assert found is not None
    assert (found.weights, found.context, found.cause) == (4096, 2048, "")
    assert found.kv == KvParameters(2 * 2 * 16 * 2 * 4, 256)


def test_the_fingerprint_is_of_config_tokenizer_template_and_tensor_headers(tmp_path: Path):
    def fingerprint(name: str, **change: Any) -> str:
        folder = model(tmp_path / name, change.get("config", LLAMA), change.get("weights"))
        for file in ("tokenizer.json", "chat_template.jinja"):
            (folder / file).write_text(change.get(file, "same"))
        found = describe_folder(name, folder)
        assert found is not None
        return found.fingerprint

    plain = fingerprint("a")
    assert plain == fingerprint("b")
    others = [
        fingerprint("c", config={**LLAMA, "rope_theta": 1.0}),
        fingerprint("d", **{"tokenizer.json": "other"}),
        fingerprint("e", **{"chat_template.jinja": "other"}),
        fingerprint("f", weights=tensors(128)),
    ]
    assert len({plain, *others}) == 5


def flip(file: Path, begin: int, end: int | None = None) -> None:
    """Flip the sign of float32 weights of a file, counted in bytes from the end of its header."""
    raw = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    for place in range(start + begin, len(raw) if end is None else start + end, 4):
        raw[place + 3] ^= 0x80
    file.write_bytes(raw)


def fingerprint_of(folder: Path) -> str:
    found = describe_folder("m", folder)
    assert found is not None
    assert not found.cause
    return found.fingerprint


def trained(folder: Path) -> Path:
    shutil.copytree(models.path("qwen3"), folder, copy_function=shutil.copyfile)
    return folder


def test_weights_of_other_signs_are_another_model(tmp_path: Path):
    first, second = trained(tmp_path / "a"), trained(tmp_path / "b")
    assert fingerprint_of(first) == fingerprint_of(second)
    flip(second / "model.safetensors", 0)
    assert fingerprint_of(first) != fingerprint_of(second)


@pytest.mark.parametrize("place", [0, 5 * 4096, 10 * 4096 - 4])
@pytest.mark.parametrize("tensor", ["first", "second"])
def test_the_begin_middle_and_tail_of_each_tensor_count(tmp_path: Path, place: int, tensor: str):
    size = 10 * 4096
    header = json.dumps(
        {
            name: {"dtype": "F32", "shape": [size // 4], "data_offsets": [at, at + size]}
            for name, at in (("first", 0), ("second", size))
        }
    ).encode()
    raw = struct.pack("<Q", len(header)) + header + b"\0" * (2 * size)
    plain, changed = model(tmp_path / "a", weights=raw), model(tmp_path / "b", weights=raw)
    assert fingerprint_of(plain) == fingerprint_of(changed)
    begin = place + (size if tensor == "second" else 0)
    flip(changed / "model.safetensors", begin, begin + 4)
    assert fingerprint_of(plain) != fingerprint_of(changed)


@pytest.mark.parametrize(
    "file",
    [
        "generation_config.json",
        "preprocessor_config.json",
        "processor_config.json",
        "1_Pooling/config.json",
        "modules.json",
        "special_tokens_map.json",
        "vocab.json",
        "merges.txt",
        "tokenizer.model",
    ],
)
def test_every_file_that_changes_prompts_or_answers_counts_and_is_seen_by_a_scan(tmp_path: Path, file: str):
    folder = model(tmp_path / "m")
    made = library(tmp_path)
    seen = [made.get_models()["m"].fingerprint]
    (folder / file).parent.mkdir(exist_ok=True)
    for text in ("{}", "{} "):
        (folder / file).write_text(text)
        made.scan()
        seen.append(made.get_models()["m"].fingerprint)
    assert len(set(seen)) == 3


def test_weights_replaced_in_place_are_seen_by_a_scan(tmp_path: Path):
    folder = model(tmp_path / "m", weights=tensors(4096))
    made = library(tmp_path)
    before = made.get_models()["m"].fingerprint
    other = tmp_path / "other"
    shutil.copyfile(folder / "model.safetensors", other)
    flip(other, 0)
    same = (folder / "model.safetensors").stat()
    os.utime(other, ns=(same.st_atime_ns, same.st_mtime_ns))
    other.replace(folder / "model.safetensors")
    made.scan()
    assert made.get_models()["m"].fingerprint != before, "the same size and time, another file"


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (tensors(4096)[:-1], "the file is incomplete: it has"),
        (tensors()[:20], "the file ends within its header"),
        (b"", "not a safetensors file"),
        (b"\xff" * 64, "not a safetensors file"),
        (struct.pack("<Q", 4) + b"{no}", "Expecting"),
    ],
)
def test_broken_weights_have_a_cause(tmp_path: Path, weights: bytes, words: str):
    found = describe_folder("m", model(tmp_path / "m", weights=weights))
    assert found is not None
    assert words in found.cause
    assert "model.safetensors" in found.cause


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from([*LLAMA, "layer_types", "text_config", "sliding_window", "model_file", "head_dim"])


@given(st.dictionaries(KEYS, JSON, max_size=5), st.dictionaries(st.sampled_from(["w", "__metadata__"]), JSON))
@example({**LLAMA, "hidden_size": 10**400}, {})
def test_unknown_files_raise_nothing(config: dict[str, Any], header: dict[str, Any]):
    raw = json.dumps(header).encode()
    with tempfile.TemporaryDirectory() as name:
        weights = struct.pack("<Q", len(raw)) + raw
        model(Path(name) / "m", {"model_type": "llama", **config}, weights)
        assert set(library(Path(name)).get_models()) <= {"m", EMBEDDED.name}


def test_a_download_that_is_not_whole_names_what_is_missing(tmp_path: Path):
    folder = model(tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"w": "model.safetensors", "v": "model-2.safetensors"}})
    )
    found = describe_folder("m", folder)
    assert found is not None
    assert "model-2.safetensors" in found.cause


def test_code_of_its_own_is_refused(tmp_path: Path):
    found = describe_folder("m", model(tmp_path / "m", {**LLAMA, "model_file": "evil.py"}))
    assert found is not None
    assert "never run" in found.cause
    assert "evil.py" in found.cause


@pytest.mark.parametrize("text", ["[]", "{", "[" * 100_000])
def test_an_invalid_config_has_a_cause(tmp_path: Path, text: str):
    folder = model(tmp_path / "m")
    (folder / "config.json").write_text(text)
    found = describe_folder("m", folder)
    assert found is not None
    assert "config.json" in found.cause


def test_hugging_faces_cache_is_read_by_the_revision_of_main(tmp_path: Path):
    entry = tmp_path / "hub" / "models--org--name-4bit"
    for revision, hidden in (("aaa", 64), ("bbb", 128)):
        model(entry / "snapshots" / revision, {**LLAMA, "hidden_size": hidden})
    (entry / "refs").mkdir()
    (entry / "refs" / "main").write_text("bbb")
    (tmp_path / "hub" / "datasets--org--x" / "snapshots" / "c").mkdir(parents=True)
    assert list(find_snapshots(tmp_path / "hub")) == [("org/name-4bit", entry / "snapshots" / "bbb")]
    assert set(library(HF_HOME=str(tmp_path)).get_models()) == {"org/name-4bit"}
    (entry / "refs" / "main").write_bytes(b"\xff\xfe\n")
    assert set(library(HF_HOME=str(tmp_path)).get_models()) == {"org/name-4bit"}, "a revision that is no text"
    unused = ModelCatalogue(ModelSettings(use_huggingface_cache=False), {"HF_HOME": str(tmp_path)})
    unused.scan()
    assert set(unused.get_models()) == {EMBEDDED.name}
    assert get_hub_folder({"HUGGINGFACE_HUB_CACHE": "/y", "HF_HOME": "/z"}) == Path("/y"), "its former name"
    assert get_hub_folder({"HF_HUB_CACHE": "/x", "HUGGINGFACE_HUB_CACHE": "/y"}) == Path("/x")


def test_the_embedded_model_is_served_where_nothing_else_is(tmp_path: Path):
    assert set(library(tmp_path).get_models()) == {EMBEDDED.name}
    model(tmp_path / "m")
    assert set(library(tmp_path).get_models()) == {"m"}


def test_a_folder_in_gguf_is_listed_with_the_reason_and_the_way_out(tmp_path: Path):
    """LM Studio has publisher/repository/file.gguf; the hub's cache has repositories without a config.json."""
    (tmp_path / "lmstudio-community" / "Qwen3-8B-GGUF").mkdir(parents=True)
    (tmp_path / "lmstudio-community" / "Qwen3-8B-GGUF" / "Qwen3-8B-Q4_K_M.gguf").write_bytes(b"GGUF")
    snapshot = tmp_path / "hub" / "models--unsloth--gemma-GGUF" / "snapshots" / "aaa"
    snapshot.mkdir(parents=True)
    (snapshot / "gemma-Q4.gguf").write_bytes(b"GGUF")
    known = library(tmp_path, HF_HUB_CACHE=str(tmp_path / "hub")).get_models()
    broken = {name: one.cause for name, one in known.items() if one.cause}
    assert set(broken) == {"lmstudio-community/Qwen3-8B-GGUF", "unsloth/gemma-GGUF"}
    assert all("in GGUF" in cause and "mlx-community" in cause for cause in broken.values())
    assert set(known) - set(broken) == {EMBEDDED.name}, "there is a model to try the pool with"
    model(tmp_path / "m")
    assert set(library(tmp_path).get_models()) == {"lmstudio-community/Qwen3-8B-GGUF", "m"}


def test_a_model_below_a_folder_with_gguf_files_is_found(tmp_path: Path):
    (tmp_path / "old.gguf").write_bytes(b"GGUF")
    model(tmp_path / "m")
    assert {name for name, one in library(tmp_path).get_models().items() if not one.cause} == {"m"}


def test_a_new_model_is_found_when_it_is_requested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = library(tmp_path)
    model(tmp_path / "new")
    assert made.find("new") is None
    assert made.find_fresh("new") is None, "two scans within FRESH seconds would be asked for by every wrong name"
    monkeypatch.setattr("node.models.catalogue.SCAN_VALID_SECONDS", 0.0)
    found = made.find_fresh("new")
    assert found is not None
    assert not found.cause


def test_a_changed_file_is_described_again_and_an_unchanged_one_is_not(tmp_path: Path):
    folder = model(tmp_path / "m")
    made = library(tmp_path)
    before = made.find("m")
    made.scan()
    assert made.find("m") is before
    (folder / "config.json").write_text(json.dumps({**LLAMA, "max_position_embeddings": 4096}))
    made.scan()
    after = made.find("m")
    assert after is not None
    assert after.context == 4096


def test_the_time_of_the_newest_file_is_that_of_a_model(tmp_path: Path):
    folder = model(tmp_path / "m")
    for place, file in enumerate(sorted(folder.iterdir())):
        os.utime(file, (1_000_000.0, 1_000_000.0 + place))
    os.utime(folder / "config.json", (1_000_000.0, 1_234_567.5))
    found = library(tmp_path).find("m")
    assert found is not None
    assert found.written == 1_234_567.5


def test_an_unreadable_folder_is_no_reason_to_fail(tmp_path: Path):
    assert set(library(tmp_path / "missing").get_models()) == {EMBEDDED.name}
    loop = tmp_path / "loop"
    loop.mkdir()
    os.symlink(loop, loop / "again")
    assert list(find_model_folders(tmp_path)) == []


@pytest.mark.parametrize(
    ("config", "kv"),
    [
        (
            {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "sliding_window": 512},
            KvParameters(128, 256, 0, 512, 384),
        ),
        ({"layer_types": ["conv", "full_attention"] * 2}, KvParameters(256, 256, 2 * 64 * 16)),
        ({"sliding_window": 512, "sliding_window_pattern": 2}, KvParameters(256, 256, 0, 512, 256)),
        ({"full_attention_interval": 4}, KvParameters(128, 256, 3 * 64 * 16)),
        ({"head_dim": 32, "torch_dtype": "float32"}, KvParameters(4 * 2 * 2 * 32 * 4, 256)),
        ({"num_key_value_heads": None}, KvParameters(4 * 2 * 4 * 16 * 2, 256)),
    ],
)
def test_the_bytes_of_a_row_are_predicted_from_the_config(config: dict[str, Any], kv: KvParameters):
    assert predict_kv({**LLAMA, **config}, 2) == kv


@pytest.mark.parametrize(
    "config",
    [
        {"text_config": LLAMA},
        {"language_config": LLAMA},
        {"llm_config": LLAMA, "num_hidden_layers": 99, "vision_config": {"num_hidden_layers": 27}},
        {"n_layer": 4, "n_head": 4, "n_embd": 128, "num_key_value_heads": 2, "head_dim": 32, "hidden_size": 128},
        {"n_layers": 4, "n_heads": 4, "d_model": 128, "n_kv_heads": 2, "torch_dtype": "bfloat16"},
        {"num_layers": 4, "num_heads": 4, "hidden_dim": 128, "num_kv_heads": 2, "torch_dtype": "bfloat16"},
        {"num_transformer_layers": 4, "num_heads": 4, "model_dim": 128, "num_attention_groups": 2},
    ],
)
def test_dimensions_are_found_where_they_are(config: dict[str, Any]):
    whole = {**LLAMA, "num_attention_heads": 4, "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 32}
    inner = {key: whole if value is LLAMA else value for key, value in config.items()}
    assert predict_kv(inner, 2) == predict_kv(whole, 2)
    assert find_unknown_dimensions(inner) == ()


def test_dimensions_that_published_configs_omit_are_known():
    """The config of Gemma 3 4B names neither heads nor the pattern of its layers. A model of states has no heads."""
    inner = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
    gemma = {"model_type": "gemma3", "text_config": inner}
    assert predict_kv(gemma, 2) == KvParameters(5 * 2 * 4 * 256 * 2, 256, 0, 1024, 29 * 2 * 4 * 256 * 2)
    assert find_unknown_dimensions(gemma) == ()
    states = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "state_size": 8, "conv_kernel": 4}
    assert predict_kv(states, 2) == KvParameters(0, 256, 2 * 128 * (3 + 8) * 2)
    assert find_unknown_dimensions(states) == ()
    named = {"layer_types": ["sliding_attention", "mamba"], "sliding_window": 9, "hidden_size": 64}
    assert find_unknown_dimensions(named) == ("num_attention_heads",)
    assert find_unknown_dimensions({**named, "sliding_window": None}) == ("num_attention_heads",)
    assert find_unknown_dimensions({**named, "num_attention_heads": 4}) == ()


def test_the_seed_case_of_a_long_prompt_takes_the_bytes_of_the_formula():
    """110,000 tokens in chunks of 2,048, 10 of 40 layers with attention, 16 heads over 2, heads of 256: 15.557 GiB."""
    config = {
        "num_hidden_layers": 40,
        "full_attention_interval": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "torch_dtype": "bfloat16",
    }
    kv, forward = predict_kv(config, 2), predict_transient(config, 2)
    written = kv.per_token * 110_000
    scores = estimate_prefill_transient(forward, 2048, 110_000 - 2048, grows=False)
    assert round((written + scores) / GIB, 3) == 15.557


def test_quantized_keys_are_predicted_at_the_size_of_the_base_type():
    assert predict_kv({**LLAMA, "quantization": {"bits": 4, "group_size": 64}}, 2) == predict_kv(LLAMA, 2)


def test_unknown_dimensions_are_warned_about_once_and_count_nothing(tmp_path: Path):
    folder = tmp_path / "odd"
    shutil.copytree(EMBEDDED, folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "odd", "architectures": ["OddForCausalLM"]}))
    library = ModelCatalogue(ModelSettings(folders=(str(tmp_path),), use_huggingface_cache=False))
    with capture_logs() as logs:
        library.scan()
        library.scan()
    (line,) = [one for one in logs if one["event"] == "dimensions unknown"]
    assert line["model"] == "odd"
    assert "num_hidden_layers" in line["missing"]
    found = library.find("odd")
    assert found is not None
    assert (found.kv.per_token, estimate_prefill_transient(found.forward, 256, 10_000)) == (0, 0)


# Figures that must be equal in every version


def test_the_fingerprint_of_a_folder_is_the_same_in_every_version(tmp_path: Path):
    """Nodes of two versions compare fingerprints. A change here makes two models of one."""
    sizes = (("BF16", 5000), ("BF16", 3 * 4096), ("BF16", 3 * 4096 + 64), ("F32", 40000))
    folder = model(tmp_path / "m", weights=safetensors(*sizes))
    (folder / "vocab.txt").write_text("a b c")
    assert fingerprint_of(folder) == "d1fd4c3cee1d95afa16e88f93dc560e0"
    (folder / "vocab.txt").rename(folder / "vocab.json")
    assert fingerprint_of(folder) == "2016f7a24660d2d3d6ec1e21d7b63619"


# the disk changes while models are loaded


def test_a_loaded_model_keeps_its_description_until_it_is_released(tmp_path: Path):
    folder = model(tmp_path / "m")
    made = library(tmp_path)
    before = made.get_models()["m"]
    made.pin(before)
    assert made.find_replacement(before) is None
    (folder / "config.json").write_text(json.dumps({**LLAMA, "max_position_embeddings": 4096}))
    made.scan()
    assert (made.find("m"), made.get_models()["m"]) == (before, before)
    after = made.find_replacement(before)
    assert after is not None
    assert (after.context, before.context) == (4096, 2048)
    other = model(tmp_path / "other")
    made.scan()
    made.pin(made.get_models()["other"])
    made.unpin("m")
    assert made.find("m") == after
    shutil.rmtree(other)
    made.scan()
    assert "other" in made.get_models(), "another loaded model is still held"
    (folder / "model.safetensors").unlink()
    made.scan()
    assert made.find_replacement(before) is None, "what cannot be loaded replaces nothing"
    assert made.get_models()["m"].cause == "it has no model*.safetensors"
    shutil.rmtree(folder)
    made.scan()
    assert made.find_replacement(before) is None


def test_no_scan_loses_a_model_that_is_pinned_meanwhile(tmp_path: Path):
    model(tmp_path / "m")
    made = library(tmp_path)
    first = made.get_models()["m"]
    loaded = [replace(first, name=f"m{number}") for number in range(300)]
    ended = Event()

    def scan_until_ended() -> int:
        scans = 0
        while not ended.is_set():
            made.scan()
            scans += 1
        return scans

    with ThreadPoolExecutor(1) as thread:
        scans = thread.submit(scan_until_ended)
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            for one in loaded:
                made.pin(one)
            for one in loaded[::2]:
                made.unpin(one.name)
        finally:
            sys.setswitchinterval(interval)
            ended.set()
        assert scans.result(60) > 0
    assert [one.name for one in loaded if made.find(one.name)] == [one.name for one in loaded[1::2]]


def test_a_model_is_unchanged_only_as_long_as_the_disk_holds_the_same(tmp_path: Path):
    folder = model(tmp_path / "m")
    made = library(tmp_path)
    found = made.get_models()["m"]
    assert made.is_unchanged(found)
    assert made.get_models()["m"] is found
    (folder / "config.json").write_text(json.dumps({**LLAMA, "max_position_embeddings": 4096}))
    assert not made.is_unchanged(found)
    assert made.get_models()["m"].context == 4096
    (folder / "config.json").write_text(json.dumps({**LLAMA, "architectures": ["BertModel"]}))
    assert not made.is_unchanged(found)
    shutil.rmtree(folder)
    assert not made.is_unchanged(found)
    assert made.get_models()["m"].context == 4096, "the next scan does not find the model"


def test_a_refresh_scans_only_after_a_while_and_returns_whether_anything_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made = library(tmp_path)
    model(tmp_path / "m")
    assert not made.refresh()
    assert set(made.get_models()) == {EMBEDDED.name}
    monkeypatch.setattr("node.models.catalogue.SCAN_INTERVAL_SECONDS", 0.0)
    assert made.refresh()
    assert set(made.get_models()) == {"m"}
    assert not made.refresh()


def test_a_folder_that_does_not_answer_hides_no_other_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(catalogue, "SCAN_TIMEOUT_SECONDS", 0.01)
    lost, local = model(tmp_path / "lost" / "a"), tmp_path / "local"
    known = library(tmp_path / "lost", local)
    assert list(known.get_models()) == ["a"]
    model(local / "b")
    (lost / "config.json").rename(tmp_path / "config.json")
    os.mkfifo(lost / "config.json")  # a reader of it waits, as a reader of a lost network disk
    known.scan()
    assert {name: found.cause for name, found in known.get_models().items()} == {"a": "", "b": ""}
    monkeypatch.setattr("node.models.folder_scan.UNREADABLE_SECONDS", 0.0)
    known.scan()
    causes = {name: found.cause for name, found in known.get_models().items()}
    assert causes == {"a": f"{tmp_path / 'lost'} does not answer: check its disk, or its network mount", "b": ""}
    with (lost / "config.json").open("w") as answer:
        (tmp_path / "config.json").rename(lost / "config.json")
        answer.write("{}")
    monkeypatch.setattr(catalogue, "SCAN_TIMEOUT_SECONDS", 20.0)
    until(lambda: known.scan() or ("a" in known.get_models() and not known.get_models()["a"].cause), 20, "an answer")


def test_a_new_library_scans_at_its_first_refresh(tmp_path: Path):
    model(tmp_path / "m")
    made = ModelCatalogue(ModelSettings(folders=(str(tmp_path),), use_huggingface_cache=False), {})
    assert made.get_models() == {}
    assert made.refresh()
    assert set(made.get_models()) == {"m"}
    unscanned = ModelCatalogue(ModelSettings(folders=(str(tmp_path),), use_huggingface_cache=False), {})
    assert unscanned.find_fresh("m") == made.find_fresh("m")


def lock(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    """Deny access to all files in these folders, as without the permission to search them. The names stay readable."""
    real = os.stat

    def stat(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if Path(str(path)).parent in folders:  # root may search every folder
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", stat)


def test_folders_that_may_not_be_searched_do_not_hide_other_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folders = [model(tmp_path / "models" / name) for name in ("locked", "locked-shelf/model")]
    cached = [tmp_path / "hub" / f"models--tests--{name}" / "snapshots" / "main" for name in ("locked", "open")]
    for folder in (tmp_path / "models" / "open", *cached):
        model(folder)
    lock(monkeypatch, folders[0], folders[1].parent, cached[0])
    known = library(tmp_path / "models", HF_HUB_CACHE=str(tmp_path / "hub")).get_models()
    assert {name: model.cause for name, model in known.items()} == {
        "locked": "its files cannot be read: Permission denied",
        "open": "",
        "tests/open": "",
    }


def test_unreadable_files_have_a_cause(tmp_path: Path):
    (tmp_path / "unreadable" / "config.json").mkdir(parents=True)
    header = json.dumps({"w": {"dtype": "F32", "data_offsets": [0]}}).encode()
    model(tmp_path / "senseless", weights=struct.pack("<Q", len(header)) + header)
    known = library(tmp_path).get_models()
    assert known["unreadable"].cause == "its files cannot be read: Is a directory"
    words = "its tensor 'w' has no valid data_offsets: download the file again"
    assert known["senseless"].cause == f"model.safetensors: {words}"
    assert EMBEDDED.name in known, "nothing else can be served"


# folders of models


def test_the_hub_cache_follows_the_variables_of_its_library(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/somewhere")
    hub = Path("/somewhere/.cache/huggingface/hub")
    for environment, folder in (
        ({}, hub),
        ({"XDG_CACHE_HOME": "/c"}, Path("/c/huggingface/hub")),
        ({"XDG_CACHE_HOME": ""}, hub),
        ({"HF_HOME": "/h", "XDG_CACHE_HOME": "/c"}, Path("/h/hub")),
        ({"HF_HOME": "/h", "HF_HUB_CACHE": "/x"}, Path("/x")),
        ({"HF_HOME": "/h", "HF_HUB_CACHE": ""}, Path("/h/hub")),
        ({"HF_HOME": "~/h"}, Path("/somewhere/h/hub")),
        ({"HF_HUB_CACHE": "~/x"}, Path("/somewhere/x")),
    ):
        assert get_hub_folder(environment) == folder
        set_here = dict(environment)
        use_hub_folder("", set_here)
        assert set_here == environment
        use_hub_folder("~/s", set_here)
        assert get_hub_folder(set_here) == Path("/somewhere/s")


def test_hidden_folders_and_those_of_the_cache_are_not_searched_and_models_not_for_others(tmp_path: Path):
    for name in (".trash/m", "models--org--name/m", "a/b/c", "a/b/.gone"):
        model(tmp_path / name)
    (tmp_path / "a" / "README.md").write_text("no folder")
    model(tmp_path / "a" / "b" / "c" / "inner")
    model(tmp_path / "e" / "f" / "g" / "deeper")
    (tmp_path / "wan").mkdir()
    (tmp_path / "wan" / "model_index.json").write_text("{}")
    (tmp_path / "wan2").mkdir()
    (tmp_path / "wan2" / "x.GGUF").write_bytes(b"")
    assert list(find_model_folders(tmp_path)) == [("wan2", tmp_path / "wan2"), ("a/b/c", tmp_path / "a" / "b" / "c")]
    assert list(find_model_folders(tmp_path, "model_index.json")) == [("wan", tmp_path / "wan")]


def test_a_scan_ends_after_so_many_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in "abcd":
        model(tmp_path / name)
    monkeypatch.setattr("node.models.folders.MAX_FOLDERS", 3)
    assert [name for name, _ in find_model_folders(tmp_path)] == ["a", "b"], "the first is the folder of all"


def test_downloads_without_a_revision_of_main_are_found_and_packages_apart(tmp_path: Path):
    named, other, package, gguf = (
        tmp_path / f"models--o--{name}" for name in ("named--4bit", "other", "wan", "z-gguf")
    )
    for folder in (named, other):
        for revision in ("b", "c"):
            model(folder / "snapshots" / revision)
        (folder / "snapshots" / "a").mkdir()
    (named / "refs").mkdir()
    (named / "refs" / "main").write_text("c\n")
    for revision in ("a", "b"):
        model(package / "snapshots" / revision)
        (package / "snapshots" / revision / "model_index.json").write_text("{}")
    (package / "refs").mkdir()
    (package / "refs" / "main").write_text("gone")
    for revision in ("a", "b"):
        (gguf / "snapshots" / revision).mkdir(parents=True)
    (gguf / "snapshots" / "b" / "z.gguf").write_bytes(b"")
    for name in ("models", "models--", "spaces--o--x"):
        model(tmp_path / name / "snapshots" / "a")
    assert list(find_snapshots(tmp_path)) == [
        ("o/named/4bit", named / "snapshots" / "c"),
        ("o/other", other / "snapshots" / "b"),
        ("o/z-gguf", gguf / "snapshots" / "b"),
    ]
    assert list(find_snapshots(tmp_path, "model_index.json")) == [("o/wan", package / "snapshots" / "a")]


# weights


def test_the_weights_of_all_files_are_added_and_one_that_misses_is_named(tmp_path: Path):
    folder = model(tmp_path / "m", {**LLAMA, "torch_dtype": None}, safetensors(("U32", 64), ("F8_E4M3", 32)))
    (folder / "model-2.safetensors").write_bytes(safetensors(("F32", 128), ("BF16", 2), ("F8_E5M2", 8)))
    found = describe_folder("m", folder)
    assert found is not None
    assert (found.stored, found.weights, found.kv.per_token) == (234, 274, 2 * 2 * 16 * 4 * 4)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {f"w{part}": f"model-{part}.safetensors" for part in (4, 3, 2)}})
    )
    found = describe_folder("m", folder)
    assert found is not None
    assert found.cause == "2 of its weight files are missing, such as model-3.safetensors: download the model again"
    for file in folder.glob("model*"):
        file.unlink()
    found = describe_folder("m", folder)
    assert found is not None
    assert (found.cause, found.stored) == ("it has no model*.safetensors", 0)


@pytest.mark.parametrize(
    ("config", "grows"),
    [
        ({}, True),
        ({"quantization_config": {"quant_method": "fp8"}}, True),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, False),
        ({"text_config": {**LLAMA, "quantization_config": {"quant_method": "mxfp8"}}}, False),
        ({"quantization_config": {"scale_fmt": "ue8m0", "weight_block_size": [32, 32]}}, False),
        ({"quantization_config": {"scale_fmt": "ue8m0", "weight_block_size": [128, 128]}}, True),
        ({"quantization_config": {"weight_block_size": [32, 32]}}, True),
        ({"quantization_config": "fp8"}, True),
        ({"quantization": {"bits": 4}}, False),
    ],
)
def test_weights_in_fp8_grow_to_two_bytes_unless_they_stay_packed(tmp_path: Path, config: dict[str, Any], grows: bool):
    found = describe_folder("m", model(tmp_path / "m", {**LLAMA, **config}, safetensors(("F8_E4M3", 100), ("F32", 8))))
    assert found is not None
    assert (found.stored, found.weights) == (108, 208 if grows else 108)


INVALID = (1, {}, *({"data_offsets": offsets} for offsets in (None, [], [0], [0, "x"], [4, 0], [-4, 0], [0, 4, 8])))
"""Entries of a tensor without valid offsets."""


def frame(entry: object) -> bytes:
    """Return a safetensors file whose header has one entry."""
    raw = json.dumps({"a": entry}).encode()
    return struct.pack("<Q", len(raw)) + raw


def test_a_model_with_a_broken_dense_layer_is_changed(tmp_path: Path):
    folder = model(tmp_path / "m")
    made = library(tmp_path)
    found = made.get_models()["m"]
    name = next(part for part in IDENTITY_FILES if part.endswith(".safetensors"))
    (folder / name).parent.mkdir()
    (folder / name).write_bytes(frame({}))
    assert not made.is_unchanged(found)


def test_each_file_that_changes_prompts_or_answers_changes_the_fingerprint(tmp_path: Path):
    folder = model(tmp_path / "m")
    names = (
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "spiece.model",
        "tiktoken.model",
        "tekken.json",
        "chat_template.jinja",
        "chat_template.json",
        "preprocessor_config.json",
        "processor_config.json",
        "modules.json",
        "1_Pooling/config.json",
        "1_LogitScore/config.json",
        "config_sentence_transformers.json",
        "sentence_bert_config.json",
        "2_Dense/config.json",
        "2_Dense/model.safetensors",
        "3_Dense/config.json",
        "3_Dense/model.safetensors",
        "4_Dense/config.json",
        "4_Dense/model.safetensors",
    )
    fingerprints = set[str]()
    for name in ("config.json", *names):
        if name != "config.json":
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(tensors() if name.endswith(".safetensors") else b"{}")
        found = describe_folder("m", folder)
        assert found is not None
        assert found.fingerprint not in fingerprints, name
        fingerprints.add(found.fingerprint)


def test_a_scan_is_valid_for_a_time_and_the_embedded_model_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    clock = Later()
    monkeypatch.setattr(time, "monotonic", clock)
    made = library(tmp_path)
    (embedded,) = made.get_models().values()
    assert not embedded.removable
    assert describe_folder("m", model(tmp_path / "m")).removable  # type: ignore[union-attr]
    clock.by = SCAN_INTERVAL_SECONDS - 5.0
    assert (made.refresh(), list(made.get_models())) == (False, [EMBEDDED.name])
    clock.by = SCAN_INTERVAL_SECONDS
    assert (made.refresh(), list(made.get_models())) == (True, ["m"])
    model(tmp_path / "n")
    clock.by = SCAN_INTERVAL_SECONDS + SCAN_VALID_SECONDS / 2
    assert made.find_fresh("n") is None
    clock.by = SCAN_INTERVAL_SECONDS + SCAN_VALID_SECONDS + 1.0
    assert made.find_fresh("n") is not None


def test_a_header_is_read_unchanged_and_errors_contain_numbers(tmp_path: Path):
    file = tmp_path / "model.safetensors"
    whole = safetensors(("F32", 64))
    file.write_bytes(whole)
    assert read_header(file) == (whole[8:-64], 64)
    file.write_bytes(struct.pack("<Q", 2) + b"{}")
    assert read_header(file) == (b"{}", 0)
    for content, words in (
        (whole[:-1], f"the file is incomplete: it has {len(whole) - 1} of {len(whole)} bytes: download it again"),
        (whole[:20], "the file ends within its header, at 20 bytes: download it again"),
        (struct.pack("<Q", 1) + b"{}", "not a safetensors file: its header claims 1 bytes"),
        (struct.pack("<Q", 104857601), "not a safetensors file: its header claims 104857601 bytes"),
        (struct.pack("<Q", 104857600), "the file ends within its header, at 8 bytes: download it again"),
        (struct.pack("<Q", 2) + b"[]", "it is not a JSON object"),
        *((frame(entry), "its tensor 'a' has no valid data_offsets: download the file again") for entry in INVALID),
        (struct.pack("<Q", 200_000) + b"[" * 200_000, "its JSON has too many levels of nesting"),
    ):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=f"^{words}$".replace("[", r"\[")):
            read_header(file)


# Estimates, in bytes

MLA = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 24, "v_head_dim": 20}
MAMBA = {"mamba_n_heads": 2, "mamba_d_head": 16, "mamba_d_state": 4, "mamba_n_groups": 2, "mamba_d_conv": 4}
MAMBA_STATE = 3 * (32 + 2 * 8) * 2 + 32 * 4 * 4
GRIFFIN = KvParameters(0, 256, 2 * 4 * 64 * 2, 9, 256)
NO_ATTENTION = ({"attention": {"no_op": True}}, {"attention": {"replace_with_linear": True}}, {"ffn": None})
DELTA = {
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 5,
}


@pytest.mark.parametrize(
    ("config", "kv"),
    [
        ({**MLA, "model_type": "deepseek_v3", "index_head_dim": 8}, KvParameters(4 * (32 + 16) * 2, 256)),
        ({**MLA, "model_type": "deepseek_v32", "index_head_dim": 8}, KvParameters(4 * (32 + 16 + 2 * 8) * 2, 256)),
        ({**MLA, "model_type": "deepseek_v2"}, KvParameters(4 * 4 * (24 + 16 + 20) * 2, 256)),
        ({**MLA, "model_type": "deepseek_v2", "v_head_dim": None}, KvParameters(4 * 4 * (24 + 16 + 24) * 2, 256)),
        ({"kv_lora_rank": 32}, KvParameters(4 * 2 * 2 * 16 * 2, 256)),
        ({"model_type": "deepseek_v3", "qk_nope_head_dim": 24}, KvParameters(4 * 2 * 2 * 16 * 2, 256)),
        ({"num_key_value_heads": None, "num_attention_heads": None}, KvParameters(4 * 2 * 64 * 2, 256)),
        ({"layer_types": ["conv"] * 3 + ["full_attention"], "conv_L_cache": 4}, KvParameters(128, 256, 3 * 3 * 64 * 2)),
        (
            {"layer_types": ["linear_attention"] * 3 + ["full_attention"], **DELTA},
            KvParameters(128, 256, 3 * (4 * (2 * 2 * 8 + 4 * 16) * 2 + 4 * 16 * 8 * 4)),
        ),
        (
            {"layer_types": ["mamba"] * 3 + ["full_attention"], **DELTA, "linear_key_head_dim": 0},
            KvParameters(128, 256, 3 * 64 * 4 * 4),
        ),
        ({"hybrid_override_pattern": "M-*E", **MAMBA}, KvParameters(128, 256, 3 * (32 + 2 * 8) * 2 + 32 * 4 * 4)),
        ({"hybrid_override_pattern": "M-*E"}, KvParameters(128, 256, 64 * 16)),
        ({"layer_types": ["mlp", "moe", "attention"]}, KvParameters(128, 256)),
        ({"layer_types": ["sliding_attention", "full_attention"]}, KvParameters(256, 256)),
        ({"layer_types": "full_attention"}, KvParameters(512, 256)),
        ({"sliding_window": 512}, KvParameters(512, 256)),
        ({"sliding_window_pattern": 2}, KvParameters(512, 256)),
        ({"sliding_window": 512, "sliding_window_pattern": 3}, KvParameters(128, 256, 0, 512, 384)),
        ({"full_attention_interval": 3}, KvParameters(128, 256, 3 * 64 * 16)),
        ({"full_attention_interval": 0, "layer_group_size": 3}, KvParameters(256, 256, 2 * 4 * 16 * 16 * 4)),
        ({"full_attn_idxs": [1, 3], "conv_L_cache": 4}, KvParameters(256, 256, 2 * 3 * 64 * 2)),
        ({"attn_layer_period": 4, "attn_layer_offset": 3, **MAMBA}, KvParameters(128, 256, 3 * MAMBA_STATE)),
        ({"attn_layer_period": 3, "attn_layer_offset": 0, **MAMBA}, KvParameters(256, 256, 2 * MAMBA_STATE)),
        ({"mamba_step": 2, **MAMBA}, KvParameters(256, 256, 2 * MAMBA_STATE)),
        ({"mamba_d_ssm": 32, **MAMBA}, KvParameters(512, 256, 4 * MAMBA_STATE)),
        (
            {"layers_block_type": ["mamba", "attention"], "mamba_expand": 2, "mamba_d_state": 8, "mamba_d_conv": 4},
            KvParameters(128, 256, (3 + 8) * 128 * 2),
        ),
        ({"num_kv_shared_layers": 1}, KvParameters(384, 256)),
        ({"num_kv_shared_layers": 9}, KvParameters(0, 256)),
        ({"num_kv_shared_layers": 4, "layer_types": ["full_attention"] * 3}, KvParameters(0, 256)),
        (
            {
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "sliding_window": 9,
                "num_kv_shared_layers": 1,
            },
            KvParameters(128, 256, 0, 9, 256),
        ),
        (
            {"global_head_dim": 32, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
            KvParameters(4 * 2 * 1 * 32 * 2, 256),
        ),
        ({"global_head_dim": 32, "num_global_key_value_heads": 1}, KvParameters(4 * 2 * 2 * 32 * 2, 256)),
        ({"block_types": ["recurrent", "attention"], "conv1d_width": 4, "attention_window_size": 9}, GRIFFIN),
        ({"_block_types": ["recurrent", "attention"], "conv1d_width": 4, "attention_window_size": 9}, GRIFFIN),
        ({"sliding_window_pattern": "LLG", "sliding_window": 9}, KvParameters(128, 256, 0, 9, 384)),
        (
            {"sliding_window_layers": [1], "sliding_window": 9, "conv_window": 2, "num_swa_key_value_heads": 4},
            KvParameters(384, 256, 4 * 128 * 2, 9, 256),
        ),
        ({"hybrid_layer_pattern": [0, 1, 1, 1], "sliding_window_size": 9}, KvParameters(128, 256, 0, 9, 384)),
        ({"loop_window_size": 9}, KvParameters(512, 256, 0, 9, 512)),
        ({"num_loops": 2}, KvParameters(1024, 256)),
        ({"decay_low_rank_dim": 8}, KvParameters(0, 256, 4 * (2 * 64 + 64 * 16) * 2)),
        (
            {"state_size": 4, "conv_kernel": 4, "num_heads": 2, "head_dim": 16, "n_groups": 2},
            KvParameters(0, 256, 4 * MAMBA_STATE),
        ),
        ({"block_configs": [{"attention": {"n_heads_in_group": 4}}, *NO_ATTENTION]}, KvParameters(128, 256)),
        (
            {"block_configs": [{"attention": {"n_heads_in_group": 4}}, *NO_ATTENTION], "num_key_value_heads": None},
            KvParameters(64, 256),
        ),
        (
            {"model_type": "gemma2", "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9},
            KvParameters(256, 256),
        ),
        ({**MLA, "model_type": "longcat_flash"}, KvParameters(4 * 2 * (32 + 16) * 2, 256)),
        ({"sparse_attention_config": {"sparse_index_dim": 8}}, KvParameters(4 * (2 * 2 * 16 + 8) * 2, 256)),
        (
            {
                "linear_attn_config": {
                    "full_attn_layers": [4],
                    "num_heads": 2,
                    "head_dim": 8,
                    "short_conv_kernel_size": 4,
                }
            },
            KvParameters(128, 256, 3 * (3 * 3 * 2 * 8 * 2 + 2 * 8 * 8 * 4)),
        ),
        ({"full_attn_idxs": list(range(9))}, KvParameters(512, 256)),
        ({"sliding_window_layers": list(range(9)), "sliding_window": 9}, KvParameters(0, 256, 0, 9, 512)),
        (
            {
                "hybrid_layer_pattern": [0, 1, 1, 1],
                "sliding_window_size": 9,
                "swa_num_key_value_heads": 4,
                "swa_head_dim": 32,
            },
            KvParameters(128, 256, 0, 9, 3 * 2 * 4 * 32 * 2),
        ),
        ({"layer_types": ["mamba", "attention"], "mamba_d_ssm": 32, **MAMBA}, KvParameters(128, 256, MAMBA_STATE)),
        ({"num_loops": 2, "loop_window_size": 9}, KvParameters(1024, 256, 0, 9, 1024)),
        ({"block_types": ["recurrent"] * 6 + ["x"] * 6, "conv1d_width": 4}, KvParameters(0, 256, 4 * 4 * 64 * 2)),
        ({"num_hidden_layers": 3, "mamba_step": 4, **MAMBA}, KvParameters(128, 256, 2 * MAMBA_STATE)),
        ({"attn_layer_period": 4, **MAMBA}, KvParameters(128, 256, 3 * MAMBA_STATE)),
        ({"attn_layer_period": 2, "attn_layer_offset": 8, **MAMBA}, KvParameters(0, 256, 4 * MAMBA_STATE)),
        ({"state_size": 4}, KvParameters(512, 256)),
        ({"conv_kernel": 4}, KvParameters(512, 256)),
        ({"model_type": "gpt_oss", "sliding_window": 9}, KvParameters(256, 256, 0, 9, 256)),
        ({"model_type": "qwen3_next"}, KvParameters(128, 256, 3 * 64 * 16)),
        (
            {
                "layer_types": ["mamba"],
                "mamba_n_heads": 2,
                "mamba_expand": 2,
                "mamba_d_state": 4,
                "mamba_d_conv": 4,
            },
            KvParameters(0, 256, (3 + 4) * 128 * 2),
        ),
        ({"layer_types": ["mamba"], "mamba_expand": 2, "mamba_d_state": 4}, KvParameters(0, 256, 64 * 16)),
        ({"layer_types": ["mamba"], "mamba_expand": 2, "mamba_d_conv": 4}, KvParameters(0, 256, 64 * 16)),
        ({"hybrid_override_pattern": ["M", "*"], **MAMBA}, KvParameters(128, 256, MAMBA_STATE)),
        (
            {"block_configs": [{"attention": {"n_heads_in_group": n}} for n in (4, 2)], "num_key_value_heads": None},
            KvParameters(256, 256),
        ),
        ({"conv_window": 2, "num_swa_key_value_heads": 1}, KvParameters(512, 256, 4 * 64 * 2)),
        ({"num_hidden_layers": True}, KvParameters(0, 256)),
        ({"num_hidden_layers": -4}, KvParameters(0, 256)),
        ({"torch_dtype": None, "dtype": "float32"}, KvParameters(4 * 2 * 2 * 16 * 4, 256)),
        ({"torch_dtype": "int4"}, KvParameters(4 * 2 * 2 * 16 * 3, 256)),
        (
            {"text_config": {"num_hidden_layers": 2, "n_embd": 8}, "vision_config": {"n_layer": 9}},
            KvParameters(256, 256),
        ),
        ({"text_config": {"hidden_size": 128}}, KvParameters(512, 256)),
        ({"text_config": {"n_layer": 2, "num_hidden_layers": 3}}, KvParameters(384, 256)),
    ],
)
def test_each_kind_of_layer_is_predicted_in_bytes(config: dict[str, Any], kv: KvParameters):
    assert predict_kv({**LLAMA, **config}, 3) == kv


@pytest.mark.parametrize(
    ("platform", "config", "transient"),
    [
        (
            "linux",
            {"intermediate_size": 100, "vocab_size": 1000},
            TransientModel(
                token=4.0 * 228, pair=16.0, seen=128.0, logits=4000.0, step_row=4.0 * 228 + 4000, step_seen=16.0
            ),
        ),
        (
            "darwin",
            {"num_key_value_heads": None},
            TransientModel(token=4.0 * 128, pair=16.0, seen=256.0, step_row=4.0 * 128, step_seen=16.0),
        ),
        (
            "darwin",
            {"head_dim": 64, "layer_types": ["sliding_attention"] * 2, "sliding_window": 512},
            TransientModel(token=4.0 * 320, pair=0.0, seen=512.0, step_row=4.0 * 320, step_seen=16.0, window=512),
        ),
        (
            "linux",
            {"head_dim": 64, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 512},
            TransientModel(token=4.0 * 320, pair=16.0, seen=512.0, step_row=4.0 * 320, step_seen=16.0),
        ),
        (
            "linux",
            {"layer_types": ["mamba"], "sliding_window": 512},
            TransientModel(token=4.0 * 128, pair=16.0, seen=128.0, step_row=4.0 * 128, step_seen=16.0),
        ),
        (
            "linux",
            {"layer_types": ["mamba", "attention", "mamba"], "mamba_expand": 2, "mamba_d_state": 16},
            TransientModel(
                token=4.0 * (128 + 14 * 2048), pair=16.0, seen=128.0, step_row=4.0 * (128 + 14 * 2048), step_seen=16.0
            ),
        ),
        (
            "linux",
            {"layer_types": ["mamba"], "mamba_expand": 2, "mamba_d_state": 16, "mamba_n_heads": 4},
            TransientModel(token=4.0 * 128, pair=16.0, seen=128.0, step_row=4.0 * 128, step_seen=16.0),
        ),
    ],
)
def test_a_forward_is_predicted_in_bytes(
    monkeypatch: pytest.MonkeyPatch, platform: str, config: dict[str, Any], transient: TransientModel
):
    monkeypatch.setattr("sys.platform", platform)
    assert predict_transient({**LLAMA, **config}, 2) == transient


def test_the_dimensions_that_miss_are_named_in_order():
    assert (
        find_unknown_dimensions(LLAMA)
        == find_unknown_dimensions({"text_config": {"n_layer": 2, "n_head": 4, "n_embd": 64}})
        == ()
    )
    assert find_unknown_dimensions({"head_dim": 64, "num_attention_heads": 0}) == (
        "num_hidden_layers",
        "num_attention_heads",
    )
    assert find_unknown_dimensions({}) == ("num_hidden_layers", "num_attention_heads", "head_dim or hidden_size")


@pytest.mark.parametrize(
    ("config", "context"),
    [
        ({"max_position_embeddings": 0, "max_seq_len": 5, "max_sequence_length": 6}, 5),
        ({"max_position_embeddings": True, "max_sequence_length": 6, "seq_length": 7}, 6),
        ({"max_position_embeddings": "8", "seq_length": 7, "n_positions": 1}, 7),
        ({"max_position_embeddings": None, "n_positions": 1}, 1),
        ({"max_position_embeddings": -1}, 4096),
    ],
)
def test_the_context_is_the_first_number_that_the_config_gives(tmp_path: Path, config: dict[str, Any], context: int):
    found = describe_folder("m", model(tmp_path / "m", {**LLAMA, **config}))
    assert found is not None
    assert found.context == context


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"architectures": None}, True),
        ({"architectures": []}, True),
        ({"architectures": ["GPT2LMHeadModel"]}, True),
        ({"architectures": ["Other", "LlamaForCausalLM"]}, True),
        ({"architectures": ["XForConditionalGeneration"]}, False),
        ({"architectures": ["Other", "XForConditionalGeneration"], "text_config": LLAMA}, True),
        ({"architectures": ["Other"], "text_config": LLAMA}, False),
        ({"model_type": None}, False),
    ],
)
def test_a_config_is_of_text_by_its_architectures(tmp_path: Path, config: dict[str, Any], text: bool):
    assert (describe_folder("m", model(tmp_path / "m", {**LLAMA, **config})) is not None) is text


def test_scan_adds_the_content_hash_once_all_files_are_hashed(tmp_path: Path):
    folder = model(tmp_path / "models" / "m")
    store = DigestStore(tmp_path / "digests.json")
    settings = ModelSettings(folders=(str(tmp_path / "models"),), use_huggingface_cache=False)
    made = ModelCatalogue(settings, {}, lambda folder: find_content(folder, store))
    made.scan()
    (found,) = made.get_models().values()
    assert found.content == ""
    made.pin(found)
    hash_folder(folder, store)
    made.scan()
    (found,) = made.get_models().values()
    assert found.content == find_content(folder, store) != ""
    assert found.version.is_same(ModelVersion(found.fingerprint))


def test_scan_continues_when_the_content_hash_of_a_folder_cannot_be_read(tmp_path: Path):
    for name in ("a", "b"):
        model(tmp_path / "models" / name)

    def find(folder: Path) -> str:
        if folder.name == "a":
            raise OSError(errno.ESTALE, "stale file handle")
        return "hash"

    settings = ModelSettings(folders=(str(tmp_path / "models"),), use_huggingface_cache=False)
    made = ModelCatalogue(settings, {}, find)
    made.scan()
    assert {name: found.content for name, found in made.get_models().items()} == {"a": "", "b": "hash"}


def test_a_loaded_model_does_not_get_the_content_hash_of_files_that_replaced_its_own(tmp_path: Path):
    folder = model(tmp_path / "models" / "m")
    store = DigestStore(tmp_path / "digests.json")
    settings = ModelSettings(folders=(str(tmp_path / "models"),), use_huggingface_cache=False)
    made = ModelCatalogue(settings, {}, lambda folder: find_content(folder, store))
    made.scan()
    made.pin(made.get_models()["m"])
    changed = bytearray((folder / "model.safetensors").read_bytes())
    changed[-1] ^= 1
    (folder / "new").write_bytes(changed)
    (folder / "new").rename(folder / "model.safetensors")
    hash_folder(folder, store)
    made.scan()
    assert made.get_models()["m"].content == ""


def test_a_loaded_model_does_not_get_the_content_hash_of_a_model_of_its_name_in_another_folder(tmp_path: Path):
    folder = model(tmp_path / "late" / "m")
    store = DigestStore(tmp_path / "digests.json")
    folders = tuple(str(tmp_path / name) for name in ("first", "late"))
    settings = ModelSettings(folders=folders, use_huggingface_cache=False)
    made = ModelCatalogue(settings, {}, lambda folder: find_content(folder, store))
    made.scan()
    loaded = made.get_models()["m"]
    assert loaded.folder == folder
    made.pin(loaded)
    hash_folder(model(tmp_path / "first" / "m", {**LLAMA, "hidden_size": 128}), store)
    made.scan()
    assert made.get_models()["m"].content == ""
    made.unpin("m")
    assert made.get_models()["m"].content


def hash_folder(folder: Path, store: DigestStore) -> None:
    """Add the digests of all files of a model folder to a store."""
    found = {folder / path: hash_file(folder / path, lambda block: None) for path in list_content_files(folder)}
    store.add({path: digest for path, digest in found.items() if digest is not None})


def test_name_quantization_names_bits_method_or_number_size():
    assert name_quantization({"quantization": {"bits": 4, "group_size": 64}}, 2) == "4-bit"
    assert name_quantization({"quantization_config": {"quant_method": "fp8"}}, 2) == "fp8"
    assert name_quantization({}, 2) == "16-bit floats"
