"""Embeddings on a real engine with a tiny model: vectors, turns, the gate, and faults."""

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from node.engine.memory.gate import GateSite
from tests.support.engine.embedders import make_embedder
from tests.support.engine.text_engine import Driver
from wire.capacity.fairness import CROWDED_PROMPTS, WeightedKey
from wire.frames import Admitted, Failed, Finished, GenerationParams, ReduceMemory, Refusal, Vectors
from wire.refusals import FailureCode, RefusalCode, Refused
from wire.report import MemoryLevel

TEXTS = ("hello", "what is the capital of France?", "x", "a longer text about rivers and mountains " * 12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    make_embedder(root / "plain", is_matryoshka=True)
    return root


@pytest.fixture
def driver(folder: Path) -> Iterator[Driver]:
    made = Driver(folder)
    yield made
    made.engine.close()


def reference(driver: Driver, text: str) -> np.ndarray:
    """Return the vector of a text by a forward of the model alone: the state of the last token, normalized."""
    ids = driver.tokenizer().encode(text, plain=True)
    model: Any = driver.resident().model
    state = np.array(model.model(mx.array([list(ids)]))[0, -1])
    return state / np.linalg.norm(state)


def test_a_batch_has_the_vectors_of_single_texts(driver: Driver):
    number = driver.embed(*TEXTS)
    together = driver.vectors(number)
    alone = np.concatenate([driver.vectors(driver.embed(text)) for text in TEXTS])
    assert np.abs(together - alone).max() < 1e-6
    assert np.abs(together - np.stack([reference(driver, text) for text in TEXTS])).max() < 1e-6
    (admitted,) = [frame for frame in driver.said[number] if isinstance(frame, Admitted)]
    end = driver.ended(number)
    assert isinstance(end, Finished)
    tokens = sum(len(driver.tokenizer().encode(text, plain=True)) for text in TEXTS)
    assert (admitted.prompt_tokens, end.prompt_tokens, end.completion_tokens) == (tokens, tokens, 0)


def test_a_long_text_runs_in_chunks_over_a_cache(folder: Path):
    driver = Driver(folder, prefill_step_size=32, min_prefill_step=16)
    text = "a text of many words " * 40
    vectors = driver.vectors(driver.embed(text, "short"))
    assert driver.gate.checks[GateSite.EMBED] > 5
    assert np.abs(vectors[0] - reference(driver, text)).max() < 1e-6
    assert driver.engine.report(0.0).memory.reserved == 0


def test_shorter_vectors_are_normalized_again(driver: Driver):
    whole, cut = (driver.vectors(driver.embed("hello", dimensions=size))[0] for size in (0, 16))
    assert cut.shape == (16,)
    assert np.abs(cut - whole[:16] / np.linalg.norm(whole[:16])).max() < 1e-6


@pytest.mark.parametrize(
    ("fields", "code", "text"),
    [
        ({"dimensions": 129}, RefusalCode.INVALID, "1 to 128"),
        ({"ids": ((5, 512),)}, RefusalCode.INVALID, "512 is outside of 0..511"),
        ({"prompt": "query"}, RefusalCode.INVALID, "no prompt 'query'"),
    ],
)
def test_an_improper_request_is_refused(driver: Driver, fields: dict[str, Any], code: RefusalCode, text: str):
    end = driver.end(driver.embed(*(() if "ids" in fields else ("hello",)), **fields))
    assert isinstance(end, Refusal)
    assert (end.refused.code, end.prompt_tokens) == (code, None)
    assert text in end.refused.message


def test_vectors_are_shortened_only_if_the_model_allows_it(tmp_path: Path):
    make_embedder(tmp_path / "fixed", matryoshka_dimensions=[32, 64])
    driver = Driver(tmp_path)
    end = driver.end(driver.embed("hello", dimensions=16))
    assert isinstance(end, Refusal)
    assert "32, 64" in end.refused.message
    assert driver.vectors(driver.embed("hello", dimensions=64)).shape == (1, 64)


def test_a_text_longer_than_the_context_is_refused_or_cut(tmp_path: Path):
    make_embedder(tmp_path / "short", max_position_embeddings=32)
    driver = Driver(tmp_path)
    text = "one two three four " * 20
    end = driver.end(driver.embed("x", text))
    count = len(driver.tokenizer().encode(text, plain=True))
    assert isinstance(end, Refusal)
    assert end.refused.code is RefusalCode.CONTEXT
    assert f"input 1 has {count} tokens" in end.refused.message
    assert "has 32" in end.refused.message
    cut = driver.vectors(driver.embed(text, truncate=True))
    ids = driver.tokenizer().encode(text, plain=True)[:32]
    assert np.abs(cut - driver.vectors(driver.embed(ids=(ids,)))).max() < 1e-6
    whole = driver.tokenizer().encode(text, plain=True)
    assert isinstance(driver.end(driver.embed(ids=(whole,))), Refusal)
    assert np.abs(cut - driver.vectors(driver.embed(ids=(whole,), truncate=True))).max() < 1e-6


def test_prompts_and_dense_layers_follow_the_files(tmp_path: Path):
    tanh, none = "torch.nn.modules.activation.Tanh", "torch.nn.modules.linear.Identity"
    modes = ("pooling_mode_mean_tokens", "pooling_mode_max_tokens")
    prompts = {"query": "find: ", "document": "text: "}
    folder = make_embedder(
        tmp_path / "dense", modes=modes, dense=((24, tanh), (12, none)), prompts=prompts, default_prompt="document"
    )
    driver = Driver(tmp_path)
    by_default, as_query = (driver.vectors(driver.embed("hello", prompt=name))[0] for name in ("", "query"))
    model: Any = driver.resident().model

    def compute(text: str) -> np.ndarray:
        states = np.array(model.model(mx.array([list(driver.tokenizer().encode(text, plain=True))]))[0])
        vector = np.concatenate([states.max(axis=0), states.mean(axis=0)])
        for number, function in ((2, np.tanh), (3, lambda array: array)):
            layer: Any = mx.load(str(folder / f"{number}_Dense/model.safetensors"))
            vector = function(np.array(layer["linear.weight"]) @ vector + np.array(layer["linear.bias"]))
        return vector / np.linalg.norm(vector)

    assert np.abs(by_default - compute("text: hello")).max() < 1e-5
    assert np.abs(as_query - compute("find: hello")).max() < 1e-5
    assert by_default.shape == (12,)


def test_every_forward_passes_the_gate_and_a_batch_shrinks(driver: Driver):
    driver.vectors(driver.embed("warm"))
    small = driver.resident().estimator.estimate_packed(1, 8) + 1
    driver.gate.asked.clear()
    driver.gate.refuses = lambda site, estimate: site is GateSite.EMBED and estimate > 2 * small
    forwards = driver.engine.report(0.0).counts.forwards
    assert len(driver.vectors(driver.embed(*["hello"] * 8))) == 8
    asked = [estimate for site, estimate in driver.gate.asked if site is GateSite.EMBED]
    ran = driver.engine.report(0.0).counts.forwards - forwards
    assert ran == sum(estimate <= 2 * small for estimate in asked) > 1
    assert max(asked) > 2 * small


def test_no_forward_runs_without_room(driver: Driver):
    driver.vectors(driver.embed("warm"))
    driver.gate.refuses = lambda site, estimate: site is GateSite.EMBED
    forwards = driver.engine.report(0.0).counts.forwards
    end = driver.end(driver.embed("hello", "you"))
    assert isinstance(end, Refusal)
    assert end.refused.code is RefusalCode.NO_ROOM
    assert driver.engine.report(0.0).counts.forwards == forwards
    assert driver.resident().usage.users == 0
    driver.gate.refuses = lambda site, estimate: site is GateSite.PREFLIGHT
    assert isinstance(driver.ended(driver.embed("hello", "you")), Refusal), "at its admission"
    assert driver.resident().usage.users == 0


def test_results_and_caches_count_as_reserved(driver: Driver):
    driver.vectors(driver.embed("warm"))
    before = driver.engine.report(0.0).memory.reserved
    number = driver.embed("hello", "word " * 2000)
    reserved = driver.engine.report(0.0).memory.reserved - before
    assert reserved >= 2 * 128 * 4 + 2000 * driver.resident().kv.per_token
    driver.cancel(number)
    assert driver.engine.report(0.0).memory.reserved == before
    assert driver.resident().usage.users == 0
    assert driver.ended(number) is None


def test_a_fault_ends_its_own_request_only(driver: Driver):
    driver.vectors(driver.embed("warm"))
    loaded, head = driver.resident(), driver.resident().head
    assert head is not None
    layers: Any = head.run_layers

    def run_layers(ids: mx.array, **more: Any) -> mx.array:
        if 7 in np.array(ids):
            raise ValueError("token 7")
        return layers(ids, **more)

    broken = dataclasses.replace(head, run_layers=run_layers)
    driver.engine.parts.models.put(dataclasses.replace(loaded, head=broken))
    good, bad = driver.embed(ids=((5, 6), (8, 9))), driver.embed(ids=((5, 7),))
    assert len(driver.vectors(good)) == 2
    end = driver.end(bad)
    assert isinstance(end, Failed)
    assert end.code == FailureCode.ENGINE_ERROR
    assert driver.engine.report(0.0).counts.failures == 1
    assert len(driver.vectors(driver.embed("hello"))) == 1


def test_numbers_that_are_not_finite_are_an_error(driver: Driver):
    driver.vectors(driver.embed("warm"))
    head = driver.resident().head
    assert head is not None
    layers: Any = head.run_layers
    broken = dataclasses.replace(head, run_layers=lambda ids, **more: layers(ids, **more) * mx.array(mx.nan))
    driver.engine.parts.models.put(dataclasses.replace(driver.resident(), head=broken))
    number = driver.embed("hello")
    end = driver.end(number)
    assert isinstance(end, Failed)
    assert "not finite" in end.message
    assert not [frame for frame in driver.said[number] if isinstance(frame, Vectors)]


def test_tokens_arrive_between_the_forwards_of_many_texts(tmp_path: Path):
    make_embedder(tmp_path / "vectors")
    make_embedder(tmp_path / "chat", normalize=False)
    (tmp_path / "chat/modules.json").unlink()
    (tmp_path / "chat/1_Pooling/config.json").unlink()
    driver = Driver(tmp_path)
    driver.answer("hello", GenerationParams(max_tokens=2), model="chat")
    driver.vectors(driver.embed("warm", model="vectors"))
    chat = driver.ask("count", GenerationParams(max_tokens=200, logit_bias=((2, -100.0),)), model="chat")
    driver.until(lambda: driver.ids[chat, 0])
    number = driver.embed(*["a text of some words " * 4] * 64, model="vectors")
    begun, forwards = len(driver.ids[chat, 0]), driver.gate.checks[GateSite.EMBED]
    driver.until(lambda: driver.ended(number) or driver.ended(chat))
    tokens, ran = len(driver.ids[chat, 0]) - begun, driver.gate.checks[GateSite.EMBED] - forwards
    assert tokens >= ran - 1 > 1, "no two forwards run without a step between them"


def test_short_texts_take_no_longer_than_a_part_of_a_step(tmp_path: Path):
    make_embedder(tmp_path / "vectors")
    make_embedder(tmp_path / "chat", normalize=False)
    (tmp_path / "chat/modules.json").unlink()
    (tmp_path / "chat/1_Pooling/config.json").unlink()
    driver = Driver(tmp_path, min_prefill_step=512)
    driver.answer("hello", GenerationParams(max_tokens=2), model="chat")
    driver.vectors(driver.embed("warm", model="vectors"))
    stats = driver.resident("vectors").stats
    stats.record_prefill(1, 60.0, 0)
    chat = driver.ask("count", GenerationParams(max_tokens=200, logit_bias=((2, -100.0),)), model="chat")
    driver.until(lambda: driver.ids[chat, 0])
    texts = (f"{word} text of some words " * 4 for word in ("one", "my", "this", "her"))
    number = driver.embed(*texts, model="vectors")
    driver.until(lambda: any(isinstance(frame, Vectors) for frame in driver.said[number]))
    count = sum(len(frame.places) for frame in driver.said[number] if isinstance(frame, Vectors))
    assert count < 4, "the smallest chunk of a long text is no measure for short ones"


def test_a_request_is_ended_to_release_its_memory(driver: Driver):
    driver.vectors(driver.embed("warm"))
    number = driver.embed("word " * 3000)
    driver.turn()
    assert driver.engine.parts.embeddings.end_newest(Refused(RefusalCode.NO_ROOM, "over the cap"), 0.0)
    driver.turn()
    assert isinstance(driver.ended(number), Refusal)
    assert driver.resident().usage.users == 0


def test_the_newest_request_is_ended_first(driver: Driver):
    driver.vectors(driver.embed("warm"))
    first, second = driver.embed("word " * 700), driver.embed("word " * 700)
    driver.turn()
    assert driver.engine.parts.embeddings.end_newest(Refused(RefusalCode.NO_ROOM, "over the cap"), 0.0)
    assert isinstance(driver.end(second), Refusal)
    assert isinstance(driver.end(first), Finished)
    assert driver.engine.report(0.0).counts.sheds == 1


def test_the_newest_request_is_ended_after_a_forward_that_exceeds_the_cap(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    driver = Driver(folder, prefill_step_size=64)
    driver.vectors(driver.embed("warm"))
    over = [Refused(RefusalCode.NO_ROOM, "over the cap")]
    monkeypatch.setattr(driver.engine.parts.forwards, "check_cap", lambda: over.pop() if over else None)
    first, second = driver.embed("word " * 300), driver.embed("word " * 300)
    end = driver.end(second)
    assert isinstance(end, Refusal)
    assert end.refused.message == "over the cap"
    assert isinstance(driver.end(first), Finished)


def test_a_request_without_room_waits_for_a_recent_peak_to_fall(driver: Driver, monkeypatch: pytest.MonkeyPatch):
    driver.vectors(driver.embed("warm"))
    monkeypatch.setattr(driver.engine.parts.forwards, "find_peak_expiry", lambda: time.monotonic() + 1.0)
    driver.gate.refuses = lambda site, estimate: site is GateSite.EMBED
    number = driver.embed("hello", "you")
    driver.turn()
    assert driver.ended(number) is None
    driver.gate.refuses = lambda site, estimate: False
    assert isinstance(driver.end(number), Finished)


def test_the_check_of_a_chunk_has_the_bytes_of_its_head(tmp_path: Path):
    make_embedder(tmp_path / "mean", modes=("pooling_mode_mean_tokens",))
    driver = Driver(tmp_path, prefill_step_size=64)
    driver.vectors(driver.embed("warm"))
    loaded = driver.resident()
    assert loaded.head is not None
    assert loaded.head.estimate_bytes(64) > 0
    expected = loaded.estimator.estimate_chunk(64, 0) + loaded.head.estimate_bytes(64)
    driver.gate.asked.clear()
    driver.embed("word " * 300)
    driver.turn()
    asked = [estimate for site, estimate in driver.gate.asked if site is GateSite.EMBED]
    assert asked[0] == expected


def test_requests_for_embeddings_are_reported_as_waiting_and_end_over_the_hard_limit(driver: Driver):
    driver.vectors(driver.embed("hello"))
    first, second = driver.embed("x " * 40), driver.embed("x y " * 40)
    report = driver.engine.report(time.monotonic())
    assert (report.waiting, report.queued_tokens > 100) == (2, True)
    driver.take(ReduceMemory(1, MemoryLevel.OVER_HARD, 1 << 40))
    end = driver.ended(second)
    assert isinstance(end, Refusal)
    assert driver.ended(first) is None
    assert driver.engine.report(time.monotonic()).waiting == 1
    assert isinstance(driver.end(first), Finished)


def test_the_time_before_the_first_forward_is_waiting(driver: Driver):
    driver.vectors(driver.embed("warm"))
    number = driver.embed("x")
    time.sleep(0.3)
    end = driver.end(number)
    assert isinstance(end, Finished)
    assert end.timings.waiting >= 0.3
    assert (end.timings.prefill > 0, end.timings.decode) == (True, 0)


def test_a_model_is_in_use_until_its_last_request_for_embeddings_ends(driver: Driver):
    driver.vectors(driver.embed("warm"))
    before = time.monotonic()
    driver.vectors(driver.embed("hello"))
    usage = driver.resident().usage
    assert usage.users == 0
    assert before <= usage.used_at <= time.monotonic()


def test_texts_for_two_models_get_the_vectors_of_their_own_models(tmp_path: Path):
    for seed, name in enumerate(("one", "two")):
        make_embedder(tmp_path / name, dense=((24, "torch.nn.modules.activation.Tanh"),), seed=seed)
    driver = Driver(tmp_path)
    alone = [driver.vectors(driver.embed("hello", model=name)) for name in ("one", "two")]
    assert np.abs(alone[0] - alone[1]).max() > 1e-3, "the models differ"
    together = [driver.embed("hello", model=name) for name in ("one", "two")]
    for number, expected in zip(together, alone, strict=True):
        assert np.abs(driver.vectors(number) - expected).max() < 1e-6


def test_a_chat_is_refused_with_the_route(driver: Driver):
    end = driver.end(driver.ask("hello"))
    assert isinstance(end, Refusal)
    assert end.refused.code is RefusalCode.UNSUPPORTED
    assert "/v1/embeddings" in end.refused.message
    assert driver.engine.report(0.0).models[0].features == ("embed",)


def test_tokens_of_a_shared_forward_count_for_the_key_of_each_text(folder: Path):
    driver = Driver(folder, prefill_step_size=80)
    driver.vectors(driver.embed(ids=((1,),)))
    lengths = {"busy": [(70,)] * (CROWDED_PROMPTS + 2), "many": [(*[8] * 6, 60)], "few": [(8, 60)]}
    numbers = {
        key: [
            driver.embed(
                ids=tuple((place + 1,) * size for place, size in enumerate(sizes)), weighted_key=WeightedKey(key)
            )
            for sizes in requests
        ]
        for key, requests in lengths.items()
    }
    driver.until(lambda: driver.said[numbers["many"][0]][1:] and driver.said[numbers["few"][0]][1:])
    (many,), (few,) = numbers["many"], numbers["few"]
    driver.until(lambda: driver.ended(many) or driver.ended(few))
    assert driver.ended(few), "its key has fewer tokens, although its request came last"
    assert not driver.ended(many)
