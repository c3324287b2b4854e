"""Plans of quantizations: names, folders, and the reasons for which there is none."""

import json
import os
import shutil
import struct
from pathlib import Path
from typing import NamedTuple

import pytest

from node.hub.errors import ModelFileError
from node.hub.quantization.plan import QuantizationPlan, choose_folder, plan_quantization, read_tensors
from node.settings import ModelSettings
from tests.models import EMBEDDED
from wire.frames import QuantizeModel
from wire.frames.model_files import ModelOrderCode
from wire.units import GIB

STORED = (EMBEDDED / "model.safetensors").stat().st_size
UNSEARCHED = ("../tiny", "me/../tiny", ".tiny", "me/.tiny", "a//b", "a/b/c/d", "models--a", "/tiny")


class FullDisk(NamedTuple):
    """Disk with little space."""

    total: int
    used: int
    free: int


class Models:
    """A node with the model `me/tiny` in the model folder `models`; its own folder is `own`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.own = folder / "models", folder / "own"
        self.settings = ModelSettings(folders=(str(self.folder), str(self.own)))
        self.environment = {"HF_HUB_CACHE": str(folder / "hub")}
        shutil.copytree(EMBEDDED, self.folder / "me" / "tiny")

    def plan(self, model: str = "me/tiny", bits: int = 4, name: str = "me/tiny-4bit") -> QuantizationPlan:
        return plan_quantization(QuantizeModel(1, model, bits, name), self.settings, self.own, self.environment)

    def refuse(self, model: str = "me/tiny", bits: int = 4, name: str = "me/tiny-4bit") -> tuple[str, str]:
        with pytest.raises(ModelFileError) as refused:
            self.plan(model, bits, name)
        return refused.value.code, refused.value.message


@pytest.fixture
def models(tmp_path: Path) -> Models:
    return Models(tmp_path)


def test_the_result_is_next_to_the_models_of_the_settings(models: Models):
    plan = models.plan()
    assert (plan.target, plan.root) == (models.folder / "me" / "tiny-4bit", models.folder)
    assert plan.temporary == models.folder / "me" / ".quantizing-tiny-4bit"
    assert plan.cost.stored < STORED / 4


def test_a_folder_that_is_a_model_or_missing_is_passed_over(models: Models):
    settings = ModelSettings(folders=(str(EMBEDDED), str(models.folder / "none"), str(models.folder)))
    assert choose_folder(settings, models.own) == models.folder


def test_a_folder_that_cannot_be_written_is_passed_over(models: Models, monkeypatch: pytest.MonkeyPatch):
    shared = models.folder.parent / "shared"
    shared.mkdir()
    settings = ModelSettings(folders=(str(shared), str(models.folder)))
    assert choose_folder(settings, models.own) == shared
    is_allowed = os.access  # root may write to every folder
    monkeypatch.setattr(os, "access", lambda path, mode: path != shared and is_allowed(path, mode))
    assert choose_folder(settings, models.own) == models.folder


def test_without_a_writable_folder_the_own_one_is_created(models: Models):
    assert choose_folder(ModelSettings(folders=(str(EMBEDDED), str(models.own))), models.own) == models.own
    assert models.own.is_dir()


def test_the_embedded_model_can_be_quantized(models: Models):
    assert models.plan("macpool-tiny", name="macpool-tiny-8bit", bits=8).source == EMBEDDED


@pytest.mark.parametrize("bits", [0, 1, 7, 16])
def test_unknown_bits_are_refused(models: Models, bits: int):
    assert models.refuse(bits=bits) == (
        ModelOrderCode.INVALID,
        f"weights cannot have {bits} bits: use 2, 3, 4, 5, 6 or 8",
    )


@pytest.mark.parametrize(
    "name", ["../tiny", "me/../tiny", ".tiny", "me/.tiny", "a//b", "a/b/c/d", "models--a", "/tiny"]
)
def test_names_that_the_catalogue_would_not_find_are_refused(models: Models, name: str):
    code, message = models.refuse(name=name)
    assert (code, "cannot be the name of a model" in message) == (ModelOrderCode.INVALID, True)
    assert sorted(models.folder.rglob("config.json")) == [models.folder / "me" / "tiny" / "config.json"]


@pytest.mark.parametrize("name", ["me/tiny", "macpool-tiny"])
def test_a_taken_name_is_refused(models: Models, name: str):
    assert models.refuse(name=name)[0] == ModelOrderCode.NAME_TAKEN


def test_a_folder_without_a_model_takes_its_name_as_well(models: Models):
    (models.folder / "me" / "tiny-4bit").mkdir()
    assert models.refuse()[0] == ModelOrderCode.NAME_TAKEN


def test_a_result_below_another_model_is_refused(models: Models):
    assert "is a model itself" in models.refuse(name="me/tiny/tiny-4bit")[1]


def test_an_unknown_model_is_refused(models: Models):
    assert models.refuse("you/large") == (ModelOrderCode.NOT_FOUND, "this node has no model you/large on its disk")


@pytest.mark.parametrize(
    "found",
    [
        {"quantization": {"group_size": 64, "bits": 4}},
        {"quantization_config": {"quant_method": "mxfp4"}},
        {"quantization_config": {"quant_method": "awq", "bits": 4}},
    ],
)
def test_a_quantized_model_is_refused(models: Models, found: dict[str, object]):
    file = models.folder / "me" / "tiny" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **found}))
    code, message = models.refuse()
    assert (code, "is quantized already" in message) == (ModelOrderCode.INVALID, True)


def test_an_export_of_modelopt_is_refused(models: Models):
    (models.folder / "me" / "tiny" / "hf_quant_config.json").write_text("{}")
    assert "is quantized already" in models.refuse()[1]


def test_a_model_with_code_is_refused(models: Models):
    file = models.folder / "me" / "tiny" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_file": "evil.py"}))
    assert "never runs" in models.refuse()[1]


def test_a_full_disk_is_refused_with_the_numbers(models: Models, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: FullDisk(10**9, 10**9 - 10**6, 10**6))
    code, message = models.refuse()
    assert code == ModelOrderCode.DISK_FULL
    assert "has 976.6 KiB free and keeps 47.7 MiB, and the quantized model needs" in message


def test_a_result_that_just_fits_the_disk_is_planned(models: Models, monkeypatch: pytest.MonkeyPatch):
    stored = models.plan().cost.stored
    for free, fits in ((5 * GIB + stored, True), (5 * GIB + stored - 1, False)):
        disk = FullDisk(10**12, 10**12 - free, free)
        monkeypatch.setattr(shutil, "disk_usage", lambda folder, disk=disk: disk)
        if fits:
            assert models.plan().cost.stored == stored
        else:
            assert models.refuse()[0] == ModelOrderCode.DISK_FULL


def test_an_incomplete_result_is_deleted_with_its_empty_folders(models: Models):
    plan = models.plan(name="new/tiny-4bit")
    plan.prepare()
    plan.temporary.mkdir()
    (plan.temporary / "config.json").write_text("{}")
    plan.discard()
    assert list(models.folder.iterdir()) == [models.folder / "me"]


def test_the_model_folder_stays_when_an_incomplete_result_is_deleted(models: Models):
    plan = models.plan(name="new/tiny-4bit")
    plan.prepare()
    shutil.rmtree(models.folder / "me")
    plan.discard()
    assert list(models.folder.iterdir()) == []


def test_a_complete_result_is_put_in_place(models: Models):
    plan = models.plan()
    plan.prepare()
    shutil.copytree(EMBEDDED, plan.temporary)
    plan.complete()
    assert (plan.target / "config.json").exists()
    assert not plan.temporary.exists()


def test_a_result_that_is_no_text_model_is_not_put_in_place(models: Models):
    plan = models.plan()
    plan.prepare()
    plan.temporary.mkdir()
    config = {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]}
    (plan.temporary / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFileError, match=r"me/tiny-4bit cannot be loaded: it is not a text model"):
        plan.complete()
    assert not plan.target.exists()


def test_a_complete_result_replaces_no_folder(models: Models):
    plan = models.plan()
    plan.prepare()
    shutil.copytree(EMBEDDED, plan.temporary)
    plan.target.mkdir()
    with pytest.raises(ModelFileError, match="this node has a model me/tiny-4bit"):
        plan.complete()


def test_a_result_that_cannot_be_loaded_is_not_put_in_place(models: Models):
    plan = models.plan()
    plan.prepare()
    shutil.copytree(EMBEDDED, plan.temporary)
    (plan.temporary / "model.safetensors").write_bytes(b"half")
    with pytest.raises(ModelFileError, match=r"me/tiny-4bit cannot be loaded: (?!it is not a text model)"):
        plan.complete()
    assert not plan.target.exists()


def test_the_rest_of_an_earlier_quantization_is_deleted(models: Models):
    plan = models.plan()
    (plan.temporary / "rest").mkdir(parents=True)
    plan.prepare()
    assert not plan.temporary.exists()


def test_tensors_are_read_from_all_weight_files():
    tensors = read_tensors(EMBEDDED)
    assert sum(one.size for one in tensors) == pytest.approx(STORED, rel=0.01)
    assert {one.name: one.shape for one in tensors}["model.embed_tokens.weight"] == (512, 128)


@pytest.mark.parametrize(
    "entry", [{}, {"data_offsets": [0]}, {"data_offsets": [0, 0]}, {"data_offsets": [0, 0], "shape": 1}]
)
def test_tensors_without_offsets_or_shape_are_a_refusal(tmp_path: Path, entry: dict[str, object]):
    raw = json.dumps({"a": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw)
    with pytest.raises(ModelFileError, match=r"model\.safetensors: ") as caught:
        read_tensors(tmp_path)
    assert caught.value.code == ModelOrderCode.INVALID


def test_prepare_creates_the_folders_of_a_new_publisher(models: Models):
    plan = models.plan(name="new/group/tiny")
    plan.prepare()
    assert plan.target.parent == models.folder / "new" / "group"
    assert plan.target.parent.is_dir()
    plan.discard()
    assert not (models.folder / "new").exists()
    assert models.folder.is_dir()
