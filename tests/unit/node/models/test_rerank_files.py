"""Files of models that score documents, as the catalogue describes them."""

from pathlib import Path

import pytest

from node.models.catalogue import describe_folder
from node.models.embedding_layout import AnswerTokens, Pooling
from node.models.rerank_files import DECODERS
from tests.support.engine.embedders import make_reranker, write_json
from wire.models.kind import ModelKind


def test_the_files_name_the_tokens_and_the_template(tmp_path: Path):
    found = describe_folder("m", make_reranker(tmp_path / "m", (5, 9)))
    assert found is not None
    assert found.layout is not None
    assert (found.kind, found.cause) == (ModelKind.RERANK, "")
    assert found.layout.answers == AnswerTokens(5, 9, has_template=True)
    assert found.layout.poolings == (Pooling.LAST,)
    assert not found.layout.normalize


@pytest.mark.parametrize("name", ["mlx-community/Qwen3-Reranker-0.6B-4bit", "qwen3-reranker-8b"])
def test_the_published_files_of_qwen_are_known_by_their_name(tmp_path: Path, name: str):
    found = describe_folder(name, make_reranker(tmp_path / "m", None, ""))
    assert found is not None
    assert found.layout is not None
    assert found.kind is ModelKind.RERANK
    assert found.layout.answers == AnswerTokens(9693, 2152, has_template=False)


def test_a_setting_names_the_kind(tmp_path: Path):
    folder = make_reranker(tmp_path / "m", None, "")
    kinds = {kind: describe_folder("m", folder, kind) for kind in ("", "rerank", "embed")}
    assert {kind: found and found.kind for kind, found in kinds.items()} == {
        "": ModelKind.CHAT,
        "rerank": ModelKind.RERANK,
        "embed": ModelKind.EMBED,
    }


@pytest.mark.parametrize(
    ("tokens", "cause"),
    [
        ({"true_token_id": None}, "no token ids in 1_LogitScore/config.json"),
        ({"true_token_id": -1, "false_token_id": 3}, "no token ids"),
        ({"true_token_id": 1, "false_token_id": "no"}, "no token ids"),
        ({"true_token_id": True}, "no token ids"),
    ],
    ids=str,
)
def test_invalid_tokens_are_the_reason(tmp_path: Path, tokens: dict[str, object], cause: str):
    folder = make_reranker(tmp_path / "m")
    write_json(folder / "1_LogitScore/config.json", tokens)
    found = describe_folder("m", folder)
    assert found is not None
    assert cause in found.cause


def test_unknown_types_and_missing_templates_are_the_reason(tmp_path: Path):
    strange = describe_folder("m", make_reranker(tmp_path / "strange", arch="gemma3_text"))
    assert strange is not None
    assert "gemma3_text: known are llama, mistral, qwen2, qwen3" in strange.cause
    bare = describe_folder("m", make_reranker(tmp_path / "bare", template="", model_type="llama"))
    assert bare is not None
    assert "no chat template with the roles query and document" in bare.cause


def test_other_tokens_are_another_model(tmp_path: Path):
    one, other = (describe_folder("m", make_reranker(tmp_path / str(token), (token, 9))) for token in (5, 6))
    assert one is not None
    assert other is not None
    assert one.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    ("template", "has_template"),
    [
        ("{{ messages | selectattr('role', 'eq', 'query') }} {{ 'document' }}", True),
        ('{{ messages | selectattr("role", "eq", "query") }} {{ "document" }}', True),
        ("{{ messages | selectattr('role', 'eq', 'query') }}", False),
        ("the query and the document", False),
    ],
)
def test_a_template_has_both_roles_in_either_quotes(tmp_path: Path, template: str, has_template: bool):
    found = describe_folder("m", make_reranker(tmp_path / "m", template=template))
    assert found is not None
    assert found.layout is not None
    assert found.layout.answers == AnswerTokens(5, 9, has_template=has_template)


@pytest.mark.parametrize("tokens", [(0, 9), (5, 0), (5, None)])
def test_the_first_token_and_a_score_of_one_token_are_allowed(tmp_path: Path, tokens: tuple[int, int | None]):
    found = describe_folder("m", make_reranker(tmp_path / "m", tokens))
    assert found is not None
    assert found.layout is not None
    assert found.layout.answers == AnswerTokens(*tokens, has_template=True)


@pytest.mark.parametrize("kind", sorted(DECODERS))
def test_every_known_type_with_a_template_scores_documents(tmp_path: Path, kind: str):
    found = describe_folder("m", make_reranker(tmp_path / "m", model_type=kind))
    assert found is not None
    assert (found.kind, found.cause) == (ModelKind.RERANK, "")
