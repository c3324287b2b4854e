from pathlib import PurePath

import pytest
from msgspec.structs import replace

from node.engine.admission_rules import (
    RequestLimits,
    compute_admission_cost,
    compute_waiting_bytes,
    refuse_before_load,
    refuse_embedding,
    refuse_improper,
    refuse_other_model,
)
from node.engine.models.model_descriptor import ModelDescriptor
from node.engine.requests.preflight import RequestShape
from node.engine.requests.prepared import PreparedEmbedding, PreparedRequest
from node.models.embedding_layout import EmbeddingLayout
from wire.capacity.arithmetic import estimate_request_transient
from wire.frames import Embed, Generate, GenerationParams, Message
from wire.refusals import RefusalCode
from wire.report import KvParameters, Memory, Model
from wire.units import GIB, MIB

FOUND = ModelDescriptor("m", PurePath("m"), "f1", context=1000, kv=KvParameters(100))
MODEL = Model(name="m", fingerprint="f1", loaded=True, weights=GIB, kv_per_token=100, context=1000)
ROOMY = Memory(cap=8 * GIB, ceiling=8 * GIB, headroom=6 * GIB)
SHAPE = RequestShape(10, 20, 15, 2)


def request(**fields: object) -> Generate:
    params = fields.pop("params", GenerationParams())
    return Generate(1, 1, "r", "m", (Message("user", "hi"),), params, 0, **fields)  # type: ignore[arg-type]


def prepared(*ids: int, **fields: object) -> PreparedRequest:
    return PreparedRequest(request(**fields), ids)


class Ledger:
    def compute_cost(self, length: int, rows: int) -> int:
        return 1000 * length * rows


def test_a_context_is_that_of_the_model_or_fewer_by_setting():
    assert RequestLimits(50, 0, 4).get_max_row_tokens(FOUND) == 1000
    assert RequestLimits(50, 300, 4).get_max_row_tokens(FOUND) == 300
    assert RequestLimits(50, 9000, 4).get_max_row_tokens(FOUND) == 1000


def test_a_size_follows_from_tokens_and_limits():
    shape = RequestLimits(50, 0, 4).compute_shape(prepared(1, 2, 3), FOUND)
    assert (shape.prompt, shape.limit) == (3, 50)


def test_costs_are_the_rows_and_their_forwards():
    model = replace(MODEL, transient=64 * MIB)
    cost = compute_admission_cost(SHAPE, Ledger(), model)
    assert cost.rows == 1000 * SHAPE.length * 2
    assert cost.total == cost.rows + estimate_request_transient(model, 10, 15, 2)
    assert cost.total > cost.rows


def test_a_request_that_waits_for_its_model_reserves_its_rows():
    assert compute_waiting_bytes(SHAPE, FOUND) == 2 * 100 * SHAPE.length


def test_an_answer_that_another_model_began_is_not_resumed():
    assert refuse_other_model(request(), FOUND) is None
    assert refuse_other_model(request(fingerprint="f1"), FOUND) is None
    assert refuse_other_model(request(fingerprint="f2"), None) is None
    refused = refuse_other_model(request(fingerprint="f2"), FOUND)
    assert refused is not None
    assert refused.code is RefusalCode.NOT_READY


@pytest.mark.parametrize(
    ("params", "resume", "refused"),
    [
        (GenerationParams(n=2), (), None),
        (GenerationParams(n=2, logit_bias=((9, 1.0),)), (), None),
        (GenerationParams(n=2, logit_bias=((10, 1.0),)), (), RefusalCode.INVALID),
        (GenerationParams(n=2), ((10,),), RefusalCode.INVALID),
        (GenerationParams(n=2), ((0,),), None),
        (GenerationParams(n=2), ((-1,),), RefusalCode.INVALID),
    ],
)
def test_token_ids_are_within_the_vocabulary(
    params: GenerationParams, resume: tuple[tuple[int, ...], ...], refused: RefusalCode | None
):
    found = refuse_improper(prepared(1, 9, params=params, resume=resume), SHAPE, MODEL, 10, 4)
    assert (found.code if found else None) is refused


def test_more_choices_than_rows_of_a_batch_are_refused():
    found = refuse_improper(prepared(1, 9), SHAPE, MODEL, 10, 1)
    assert found is not None
    assert found.code is RefusalCode.UNSUPPORTED


def test_a_prompt_with_an_id_outside_of_the_vocabulary_is_refused():
    found = refuse_improper(prepared(1, 10), SHAPE, MODEL, 10, 4)
    assert found is not None
    assert "token id 10 is outside of 0..9" in found.message


def test_before_a_load_the_cause_of_the_model_is_the_first_reason():
    loadable = Model(name="m", fingerprint="f1", loaded=False, weights=GIB, kv_per_token=100, context=1000)
    assert refuse_before_load(request(), SHAPE, loadable, ROOMY, 4) is None
    wide = refuse_before_load(request(), SHAPE, loadable, ROOMY, 1)
    assert wide is not None
    assert wide.code is RefusalCode.UNSUPPORTED
    broken = Model(name="m", fingerprint="f1", loaded=False, weights=GIB, kv_per_token=100, context=1000, cause="torn")
    found = refuse_before_load(request(), SHAPE, broken, ROOMY, 1)
    assert found is not None
    assert (found.code, found.message) == (RefusalCode.LOAD_FAILED, "m cannot be loaded: torn")


def embedding(*inputs: tuple[int, ...], dimensions: int = 0) -> PreparedEmbedding:
    return PreparedEmbedding(Embed(1, 1, "r", "m", dimensions=dimensions), inputs)


def test_token_ids_of_an_embedding_are_below_the_size_of_the_vocabulary():
    layout = EmbeddingLayout()
    assert refuse_embedding(embedding((1, 99), (0,)), layout, 8, 100) is None
    refused = refuse_embedding(embedding((1,), (100, 2)), layout, 8, 100)
    assert refused is not None
    assert (refused.code, refused.message) == (RefusalCode.INVALID, "token id 100 is outside of 0..99")


@pytest.mark.parametrize(
    ("layout", "wanted", "text"),
    [
        (EmbeddingLayout(), 8, ""),
        (EmbeddingLayout(), 4, "have 8 numbers and cannot be shortened to 4"),
        (EmbeddingLayout(can_shorten=True), 4, ""),
        (EmbeddingLayout(can_shorten=True), 9, "may have 1 to 8 numbers, not 9"),
        (EmbeddingLayout(can_shorten=True, lengths=(2, 4)), 4, ""),
        (EmbeddingLayout(can_shorten=True, lengths=(2, 4)), 8, ""),
        (EmbeddingLayout(can_shorten=True, lengths=(2, 4)), 3, "may have 2, 4 numbers, not 3"),
    ],
)
def test_the_length_of_vectors_is_that_of_the_model_or_one_that_it_allows(
    layout: EmbeddingLayout, wanted: int, text: str
):
    refused = refuse_embedding(embedding((1,), dimensions=wanted), layout, 8, 100)
    assert (refused is None) == (not text)
    assert refused is None or (refused.code is RefusalCode.INVALID and text in refused.message)
