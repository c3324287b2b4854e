"""Embeddings and scores of the scripted engine: vectors, refusals, and counts of tokens."""

import math
import struct
from typing import Any

import msgspec
import pytest

from node.engine.process.crash_recorder import CrashRecorder
from node.engine.scripted.engine import ScriptedEngine
from node.settings import ScriptedSettings
from wire.frames import Admitted, Cancel, Embed, Finished, Frame, MemoryLimits, Refusal, Vectors
from wire.refusals import RefusalCode
from wire.units import GIB

NOW = 1000.0


def make_engine(**changes: Any) -> ScriptedEngine:
    made = ScriptedEngine(msgspec.convert({"max_context": 4, **changes}, ScriptedSettings), CrashRecorder())
    made.handle(MemoryLimits(96 * GIB, 96 * GIB, 2 * GIB, "metal"), NOW)
    return made


def embed(engine: ScriptedEngine, **fields: Any) -> list[Frame]:
    """Return the frames that answer a request."""
    frames = engine.handle(Embed(1, 1, "r1", "scripted-1", **fields), NOW)
    return [*frames, *(frame for step in engine.step(NOW + 0.5) for frame in step)]


def read_numbers(frames: list[Frame], count: int) -> list[tuple[float, ...]]:
    """Return the `count` vectors of frames, in the order of the texts."""
    (vectors,) = [frame for frame in frames if isinstance(frame, Vectors)]
    assert vectors.places == tuple(range(count))
    size = len(vectors.data) // count
    return [struct.unpack(f"<{size // 4}f", vectors.data[at * size : (at + 1) * size]) for at in range(count)]


def test_vectors_have_the_length_1_and_follow_from_the_words():
    engine = make_engine(dimensions=8)
    frames = embed(engine, texts=("one two", "two one", "one three", "four five six"))
    assert isinstance(frames[0], Admitted)
    end = frames[-1]
    assert isinstance(end, Finished)
    assert (frames[0].prompt_tokens, end.prompt_tokens, engine.report(NOW).counts.forwards) == (9, 9, 1)
    same, swapped, similar, other = read_numbers(frames, 4)
    assert len(same) == 8
    assert [math.hypot(*vector) for vector in (same, swapped, similar, other)] == pytest.approx([1.0] * 4, abs=1e-6)
    assert same == swapped
    assert math.dist(same, similar) > 0
    (short,) = read_numbers(embed(engine, texts=("one two",), dimensions=2), 1)
    assert (len(short), math.hypot(*short)) == (2, pytest.approx(1.0, abs=1e-6))


def test_scores_are_the_share_of_common_words():
    frames = embed(make_engine(reranks=True), texts=("b c", "a b", "d"), query="a b")
    assert [score for (score,) in read_numbers(frames, 3)] == pytest.approx([1 / 3, 1.0, 0.0])
    assert isinstance(frames[0], Admitted)
    assert frames[0].prompt_tokens == 4 + 4 + 3, "each document is read with the query"


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"texts": ("a",), "dimensions": 9}, RefusalCode.INVALID, "have 8 numbers at most"),
        ({"texts": ("a",), "prompt": "query"}, RefusalCode.INVALID, "has no prompt 'query'"),
        ({"texts": ("a",), "query": "a"}, RefusalCode.UNSUPPORTED, ""),
        ({"ids": ((),)}, RefusalCode.INVALID, "has no text"),
        ({}, RefusalCode.INVALID, "has no text"),
        ({"texts": ("a", "a b c d e")}, RefusalCode.CONTEXT, "input 1 has 5 tokens"),
    ],
)
def test_an_improper_request_is_refused_with_its_reason(fields: dict[str, Any], code: RefusalCode, words: str):
    (refusal,) = embed(make_engine(dimensions=8), **fields)
    assert isinstance(refusal, Refusal)
    assert refusal.refused.code is code
    assert words in refusal.refused.message


def test_a_text_is_cut_on_request():
    engine = make_engine(dimensions=8)
    frames = embed(engine, texts=("a b c d e",), truncate=True)
    assert isinstance(frames[0], Admitted)
    assert frames[0].prompt_tokens == 4
    assert read_numbers(frames, 1) == read_numbers(embed(engine, texts=("a b c d",)), 1)


def test_a_cancelled_request_has_no_vectors():
    engine = make_engine(dimensions=8)
    engine.handle(Embed(1, 1, "r1", "scripted-1", texts=("a",)), NOW)
    assert (engine.report(NOW).waiting, engine.next_step_at(NOW)) == (1, NOW)
    engine.handle(Cancel(1), NOW)
    assert engine.step(NOW) == [[]]
    assert engine.report(NOW).waiting == 0
