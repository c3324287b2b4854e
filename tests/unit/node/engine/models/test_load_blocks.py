from dataclasses import replace
from pathlib import PurePath

import pytest

from node.engine.models.load_blocks import LoadBlocks, may_pass
from node.engine.models.model_descriptor import ModelDescriptor
from wire.frames import ModelBan

FOUND = ModelDescriptor("m", PurePath("m"), "f1")


def test_a_ban_ends_with_its_time():
    blocks = LoadBlocks()
    blocks.ban((ModelBan("m", 60.0, "it crashes"),), 100.0)
    assert blocks.find_cause(FOUND, 130.5) == "it crashes; loading is blocked for another 30 s"
    assert blocks.find_cause(replace(FOUND, name="other"), 130.5) == ""
    assert blocks.find_cause(FOUND, 160.0) == ""


def test_a_broken_model_stays_out_until_its_files_change_or_an_order_tries_again():
    blocks = LoadBlocks()
    blocks.record_failure(FOUND, "ValueError: torn")
    assert blocks.find_cause(FOUND, 0.0) == "ValueError: torn"
    assert blocks.find_cause(replace(FOUND, fingerprint="f2"), 0.0) == ""
    blocks.clear_failure("m")
    assert blocks.find_cause(FOUND, 0.0) == ""


def test_a_model_whose_files_could_not_be_read_is_tried_again():
    blocks = LoadBlocks()
    blocks.record_failure(FOUND, "RuntimeError: [read] Unable to read from file.", 160.0)
    assert blocks.find_cause(FOUND, 100.5) == "RuntimeError: [read] Unable to read from file.; the next try is in 60 s"
    assert blocks.find_cause(replace(FOUND, cause="no tokenizer"), 100.5) == "no tokenizer"
    assert blocks.find_cause(FOUND, 160.0) == ""


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (RuntimeError("[read] Unable to read from file."), True),
        (RuntimeError("[load_safetensors] Failed to open file /models/m/model.safetensors"), True),
        (FileNotFoundError(2, "No such file or directory"), True),
        (RuntimeError("[malloc] Unable to allocate 1048576 bytes."), True),
        (RuntimeError("[metal::malloc] Resource limit (499000) exceeded."), True),
        (MemoryError(), True),
        (RuntimeError("[load_safetensors] Invalid json metadata"), False),
        (ValueError("Missing 3 parameters"), False),
    ],
)
def test_only_files_and_memory_that_are_missing_now_are_tried_again(error: Exception, passes: bool):
    assert may_pass(error) is passes


def test_a_model_with_unusable_files_has_a_cause():
    assert LoadBlocks().find_cause(replace(FOUND, cause="no tokenizer"), 0.0) == "no tokenizer"
