"""Forwards for embeddings while rows decode: parts by layers, each through the gate, and steps between them."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest

from node.engine.embedding.forward import EmbeddingForward
from node.engine.embedding.layer_states import choose_pauses, count_layers, record_layers
from node.engine.kv.kv_cache import evaluate
from node.engine.memory.footprint import MlxPeakTracker
from node.engine.memory.gate import GateSite
from tests.models import TRAINED
from tests.support.engine.embedders import make_embedder, make_reranker
from tests.support.engine.encoders import LAYERS as ENCODER_LAYERS
from tests.support.engine.encoders import make_encoder
from tests.support.engine.text_engine import Driver
from wire.frames import Failed, Finished, Frame, GenerationParams, Refusal, Vectors
from wire.units import MIB

LAYERS = 2
TEXTS = ("a text of some words " * 3, "hello", "what is the capital of France?", "x y z")
ENDLESS = GenerationParams(max_tokens=4000, logit_bias=((2, -100.0),))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    make_embedder(root / "vectors")
    make_reranker(root / "scores")
    make_encoder(root / "encoder", "bert", pooling="mean")
    make_embedder(root / "chat", normalize=False)
    (root / "chat/modules.json").unlink()
    (root / "chat/1_Pooling/config.json").unlink()
    return root


@pytest.fixture
def driver(folder: Path) -> Iterator[Driver]:
    """Yield an engine whose chat decodes. Its forwards for embeddings take as many parts as the model has layers."""
    made = Driver(folder)
    for name, text, options in (("vectors", "warm", {}), ("scores", "warm", {"query": "q"}), ("encoder", "w1", {})):
        made.vectors(made.embed(text, model=name, **cast("Any", options)))
        made.resident(name).stats.record_prefill(1, 60.0, 0)
    yield made
    made.engine.close()


def chat(driver: Driver) -> int:
    """Start a chat without an end, and await its first token."""
    number = driver.ask("count", ENDLESS, model="chat")
    driver.until(lambda: driver.ids[number, 0])
    return number


def parts_until(driver: Driver, number: int) -> tuple[int, int]:
    """Step until a request has ended. Return the checks of the gate for its forwards, and the steps of chats."""
    checks, steps = driver.gate.checks[GateSite.EMBED], driver.engine.report(0.0).counts.steps
    driver.end(number)
    return driver.gate.checks[GateSite.EMBED] - checks, driver.engine.report(0.0).counts.steps - steps


@pytest.mark.parametrize("parts", [1, LAYERS, ENCODER_LAYERS])
@pytest.mark.parametrize("model", ["vectors", "encoder"])
def test_evaluation_in_parts_changes_no_vector(driver: Driver, model: str, parts: int):
    head = driver.resident(model).head
    assert head is not None
    assert head.layers == (LAYERS if model == "vectors" else ENCODER_LAYERS)
    rows, lengths = ([5, 6, 7, 8], [9, 1, 0, 0]), (4, 2)
    vectors: list[np.ndarray] = []
    for wanted in (1, min(parts, head.layers)):
        pooled = head.start(lengths)
        between = head.build(rows, pooled, parts=wanted)
        assert [states.shape[:2] for states in between] == [(2, 4)] * (wanted - 1)
        for states in between:
            evaluate(states)
        vectors.append(np.array(head.finish(pooled)))
    assert np.array_equal(vectors[0], vectors[1])


@pytest.mark.parametrize("arch", ["llama", *TRAINED])
def test_the_states_of_all_architectures_are_recorded(tmp_path: Path, arch: str):
    driver = Driver(make_embedder(tmp_path / "m", arch=arch).parent)
    driver.vectors(driver.embed("warm"))
    head = driver.resident().head
    assert head is not None
    assert head.layers > 1
    pooled = head.start([3])
    assert len(head.build([[5, 6, 7]], pooled, parts=head.layers)) == head.layers - 1
    assert count_layers(head.run_layers) == head.layers, "the layers are as before"
    driver.engine.close()


def test_layers_are_restored_after_a_fault(driver: Driver):
    module: Any = driver.resident("vectors").head.run_layers  # type: ignore[union-attr]
    before = list(module.layers)

    def run() -> None:
        with record_layers(module, lambda layer, states: None):
            assert module.layers[0].self_attn is before[0].self_attn
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert module.layers == before


def test_parts_have_nearly_the_same_size():
    assert choose_pauses(12, 4) == {3, 6, 9}
    assert choose_pauses(5, 2) == {2}
    assert choose_pauses(4, 1) == set()


@pytest.mark.parametrize(("model", "query"), [("vectors", ""), ("scores", "what are rivers?"), ("encoder", "")])
def test_steps_follow_each_part_and_the_vectors_are_the_same(driver: Driver, model: str, query: str):
    texts = ("w1 w2", "w3") if model == "encoder" else TEXTS
    options: dict[str, Any] = {"model": model} | ({"query": query} if query else {})
    alone = driver.vectors(driver.embed(*texts, **options))
    driver.resident(model).stats.record_prefill(1, 60.0, 0)
    chat(driver)
    number = driver.embed(*texts, **options)
    parts, steps = parts_until(driver, number)
    head = driver.resident(model).head
    assert head is not None
    assert parts >= len(texts) * head.layers / 2
    assert steps >= parts - 1, "no two parts run without a step between them"
    assert np.abs(driver.vectors(number) - alone).max() < 1e-5


def test_the_tokens_of_a_forward_in_several_parts_count_once(driver: Driver):
    chat(driver)
    before = driver.engine.report(0.0).counts.prefill_tokens
    number = driver.embed("hello", model="vectors")
    parts, _ = parts_until(driver, number)
    end = driver.end(number)
    assert isinstance(end, Finished)
    assert parts == LAYERS
    assert driver.engine.report(0.0).counts.prefill_tokens == before + end.prompt_tokens


def test_without_a_chat_all_layers_are_one_part(driver: Driver):
    forwards = driver.engine.report(0.0).counts.forwards
    driver.vectors(driver.embed("hello", model="vectors"))
    assert driver.engine.report(0.0).counts.forwards == forwards + 1


def test_the_rest_of_a_forward_is_one_part_when_the_chat_has_ended(driver: Driver):
    talk = chat(driver)
    number = driver.embed("hello", model="vectors")
    checks = driver.gate.checks[GateSite.EMBED]
    driver.until(lambda: driver.gate.checks[GateSite.EMBED] > checks)
    driver.cancel(talk)
    assert parts_until(driver, number)[0] == 1


def test_a_part_without_room_waits_for_the_chat(driver: Driver):
    talk = chat(driver)
    number = driver.embed("hello", model="vectors")
    checks = driver.gate.checks[GateSite.EMBED]
    driver.until(lambda: driver.gate.checks[GateSite.EMBED] > checks)
    driver.gate.refuses = lambda site, estimate: site is GateSite.EMBED
    forwards = driver.engine.report(0.0).counts.forwards
    driver.until(lambda: driver.gate.checks[GateSite.EMBED] > checks + 4, turns=200)
    assert driver.ended(number) is None
    assert driver.engine.report(0.0).counts.forwards == forwards, "no part runs without room"
    driver.gate.refuses = lambda site, estimate: False
    assert len(driver.vectors(number)) == 1
    assert driver.ended(talk) is None


def test_a_part_without_room_ends_its_request_when_nothing_can_release_memory(driver: Driver):
    talk = chat(driver)
    number = driver.embed("hello", model="vectors")
    other = driver.embed("you", model="encoder")
    checks = driver.gate.checks[GateSite.EMBED]
    driver.until(lambda: driver.gate.checks[GateSite.EMBED] > checks)
    driver.gate.refuses = lambda site, estimate: site is GateSite.EMBED and driver.ended(number) is None
    driver.cancel(talk)
    assert isinstance(driver.end(number), Refusal)
    assert len(driver.vectors(other)) == 1
    assert driver.engine.report(0.0).memory.reserved == 0


def test_a_cancelled_request_leaves_the_texts_of_others_in_the_forward(driver: Driver):
    chat(driver)
    first, second = (driver.embed(ids=((5 + number,), (7 + number,)), model="vectors") for number in range(2))
    checks = driver.gate.checks[GateSite.EMBED]
    driver.until(lambda: driver.gate.checks[GateSite.EMBED] > checks)
    driver.cancel(first)
    parts, _ = parts_until(driver, second)
    assert parts == LAYERS - 1, "the forward continues"
    assert driver.vectors(second).shape[0] == 2
    assert not [frame for frame in driver.said[first] if isinstance(frame, Finished | Vectors)]


def test_a_cancelled_request_ends_its_forward(driver: Driver):
    chat(driver)
    reserved = driver.engine.report(0.0).memory.reserved
    first = driver.embed("word " * 50, model="scores", query="what are rivers?")
    checks = driver.gate.checks[GateSite.EMBED]
    driver.until(lambda: driver.gate.checks[GateSite.EMBED] > checks)
    driver.cancel(first)
    assert driver.engine.report(0.0).memory.reserved <= reserved
    assert driver.resident("scores").usage.users == 0
    other = driver.embed("hello", model="vectors")
    driver.until(lambda: driver.ended(other), turns=200)


def test_a_fault_in_a_later_part_ends_its_request(driver: Driver, monkeypatch: pytest.MonkeyPatch):
    chat(driver)
    number = driver.embed("hello", model="vectors")
    checks = driver.gate.checks[GateSite.EMBED]
    driver.until(lambda: driver.gate.checks[GateSite.EMBED] > checks)
    monkeypatch.setattr("node.engine.embedding.runner.evaluate", _raise_fault)
    end = driver.end(number)
    assert isinstance(end, Failed)
    monkeypatch.undo()
    assert len(driver.vectors(driver.embed("hello", model="vectors"))) == 1


def _raise_fault(*arrays: mx.array) -> None:
    raise RuntimeError("the GPU is gone")


class PlainForward(EmbeddingForward):
    """Forward of arrays without a model."""

    def complete(self) -> list[Frame]:
        """Return no frames."""
        return []


def test_the_need_of_the_remaining_parts_is_without_the_bytes_that_are_held():
    requests = [cast("Any", SimpleNamespace(number=number)) for number in (7, 8)]
    forward = PlainForward(requests, 9, 10 * MIB, [["first"], ["second"], ["third"]])
    assert (forward.number, PlainForward(requests[:1], 9, 0, []).number) == (0, 7)
    assert (forward.need, forward.has_begun, forward.has_ended) == (10 * MIB, False, False)
    peak, held = MlxPeakTracker(), list[mx.array]()
    for size, needs in ((2 * MIB, 8 * MIB), (16 * MIB, 0)):
        peak.mark()
        assert forward.take_arrays(rest=False)
        transient = mx.ones((4 * MIB,), mx.uint8)
        held.append(mx.ones((size,), mx.uint8))
        evaluate([transient, held[-1]])
        del transient
        forward.record_part(0.25, peak)
        assert abs(forward.need - needs) < MIB // 8
    assert (forward.seconds, forward.has_begun, forward.has_ended) == (0.5, True, False)
    assert forward.take_arrays(rest=True) == ["third"]
    assert forward.has_ended


def test_the_rest_of_a_forward_is_its_last_arrays():
    forward = PlainForward([cast("Any", SimpleNamespace(number=7))], 9, 0, [["first"], ["second"], ["third"]])
    assert forward.take_arrays(rest=True) == ["third"]
    assert forward.has_ended


def test_a_request_that_does_not_belong_to_a_forward_is_not_removed_from_it():
    one, other = (cast("Any", SimpleNamespace(number=number)) for number in (7, 8))
    forward = PlainForward([one], 9, 0, [])
    forward.remove_request(other)
    assert forward.requests == [one]
    forward.remove_request(one)
    assert forward.requests == []
