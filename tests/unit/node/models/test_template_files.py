"""Reasoning is found in the chat template of a model, wherever its files have the template."""

import json
import os
from pathlib import Path

import pytest

from node.models.catalogue import EMBEDDED, ModelCatalogue
from node.models.embedding_files import MAX_FILE_BYTES
from node.models.template_files import has_reasoning
from node.settings import ModelSettings

OPENS = "{{ '<think>\\n' if enable_thinking }}"
CUTS = "{{ message.content.split('</think>')[-1] }}"


@pytest.mark.parametrize(
    ("template", "found"),
    [(OPENS, True), ([{"name": "default", "template": OPENS}], True), (CUTS, False), (None, False)],
)
def test_reasoning_is_found_in_the_tokenizer_s_config(tmp_path: Path, template: object, found: bool):
    content = {"chat_template": template, "added_tokens_decoder": {"7": {"content": "<think>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
    assert has_reasoning(tmp_path) is found


def test_a_template_file_replaces_that_of_the_tokenizer_s_config(tmp_path: Path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": OPENS}))
    for text in (CUTS, ""):
        (tmp_path / "chat_template.jinja").write_text(text)
        assert not has_reasoning(tmp_path)


def test_files_without_a_template_have_no_reasoning(tmp_path: Path):
    assert not has_reasoning(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[")
    assert not has_reasoning(tmp_path)


def test_a_template_file_that_is_too_large_is_not_searched(tmp_path: Path):
    file = tmp_path / "chat_template.jinja"
    file.write_text(OPENS)
    assert has_reasoning(tmp_path)
    os.truncate(file, MAX_FILE_BYTES + 1)
    assert not has_reasoning(tmp_path)


def test_the_catalogue_knows_reasoning_without_a_load():
    catalogue = ModelCatalogue(ModelSettings(use_huggingface_cache=False), {})
    catalogue.scan()
    assert catalogue.get_models()[EMBEDDED.name].reasoning
