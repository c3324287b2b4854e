from dataclasses import replace
from pathlib import PurePath

from node.engine.models.load_blocks import LoadBlocks
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


def test_a_model_with_unusable_files_has_a_cause():
    assert LoadBlocks().find_cause(replace(FOUND, cause="no tokenizer"), 0.0) == "no tokenizer"
