"""Demand of conversations, of plain prompts and of texts for embeddings."""

import pytest
from msgspec.structs import replace

from router.admission.request_limits import TEMPLATE_BYTES
from router.dispatch.request import EmbeddingInput
from router.dispatch.resource_demand import (
    BYTES_PER_ID,
    compute_demand,
    compute_embedding_demand,
    compute_plain_demand,
    find_features,
)
from router.placement.candidate import GRAMMAR, LOGPROBS, SAMPLING, TOOLS, ResourceDemand
from wire.frames import GenerationParams, GrammarKind, GrammarSpec, Message, ToolCall
from wire.models.kind import ModelKind

PLAIN = GenerationParams(max_tokens=7, n=2)


@pytest.mark.parametrize(
    ("messages", "tools", "size"),
    [
        ((), "", 0),
        ((Message("user", "four"),), "", 4 + TEMPLATE_BYTES),
        ((Message("user", "é" * 3),), "", 6 + TEMPLATE_BYTES),
        ((Message("user", "four"), Message("assistant", "", reasoning="ü!")), "", 4 + 3 + 2 * TEMPLATE_BYTES),
        (
            (
                Message(
                    "assistant",
                    "",
                    tool_calls=(ToolCall("id", "name", '{"é":1}'), ToolCall("", "n", "")),
                ),
            ),
            "",
            2 + 4 + 8 + 1 + 3 * TEMPLATE_BYTES,
        ),
        ((Message("user", "four"),), "[é]", 4 + 4 + TEMPLATE_BYTES),
    ],
)
def test_all_text_of_a_conversation_counts_in_bytes(messages: tuple[Message, ...], tools: str, size: int):
    demand = compute_demand("tiny", messages, PLAIN, tools)
    assert demand == ResourceDemand("tiny", size, None, 7, 2, frozenset({TOOLS}) if tools else frozenset())


def test_the_ids_of_a_plain_prompt_are_its_exact_tokens():
    assert compute_plain_demand("tiny", "éa", (), PLAIN) == ResourceDemand("tiny", 3, None, 7, 2)
    assert compute_plain_demand("tiny", "", (1, 2, 3), PLAIN) == ResourceDemand("tiny", 0, 3, 7, 2)


@pytest.mark.parametrize(
    ("embed", "longest", "others", "kind"),
    [
        (EmbeddingInput(("é", "four", "a")), 4, 3, ModelKind.EMBED),
        (EmbeddingInput(ids=((1, 2, 3), (4,))), 3 * BYTES_PER_ID, BYTES_PER_ID, ModelKind.EMBED),
        (EmbeddingInput(("a", "bc"), query="éé"), 6, 5, ModelKind.RERANK),
    ],
)
def test_the_longest_text_decides_the_memory_of_embeddings(
    embed: EmbeddingInput, longest: int, others: int, kind: ModelKind
):
    demand = compute_embedding_demand("tiny", embed)
    assert demand == ResourceDemand("tiny", longest, max_tokens=1, kind=kind, other_bytes=others)
    assert embed.count == len(embed.texts) + len(embed.ids)


FEATURES: tuple[tuple[dict[str, object], str, set[str]], ...] = (
    ({}, "", set()),
    ({"temperature": 0.5, "top_p": 0.5, "seed": 1, "stop": ("x",)}, "", set()),
    ({"max_tokens": 8, "n": 3, "top_logprobs": 2, "one_call": True}, "", set()),
    ({"top_k": 1}, "", {SAMPLING}),
    ({"min_p": 0.1}, "", {SAMPLING}),
    ({"presence_penalty": 0.1}, "", {SAMPLING}),
    ({"frequency_penalty": -0.1}, "", {SAMPLING}),
    ({"repetition_penalty": 1.1}, "", {SAMPLING}),
    ({"logit_bias": ((1, 2.0),)}, "", {SAMPLING}),
    ({"logprobs": True}, "", {LOGPROBS}),
    ({"grammar": GrammarSpec(GrammarKind.JSON_SCHEMA, "{}")}, "", {GRAMMAR}),
    ({"logprobs": True, "top_k": 1}, "[]", {LOGPROBS, SAMPLING, TOOLS}),
)


def test_every_parameter_has_a_case():
    """A node without the feature of a parameter would ignore the parameter silently."""
    cases = {name for changes, _, _ in FEATURES for name in changes}
    assert cases == set(GenerationParams.__struct_fields__), "add a case, and a feature if older nodes must not get it"


@pytest.mark.parametrize(("changes", "tools", "features"), FEATURES)
def test_only_parameters_with_an_effect_need_a_feature(changes: dict[str, object], tools: str, features: set[str]):
    assert find_features(replace(PLAIN, **changes), tools) == features
