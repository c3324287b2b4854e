"""The scripted engine and the text engine serve requests for embeddings and scores in the same way.

Both get the same frames. Their numbers differ, because the scripted engine runs no model.
"""

import time
from collections.abc import Callable, Collection, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from node.engine.memory.gate import GateSite
from node.engine.process.crash_recorder import CrashRecorder
from node.engine.process.interface import Engine, import_builder
from node.engine.process.kinds import KINDS
from node.engine.requests.tokenize_admission import UntokenizedPrompt
from node.settings import EngineSettings, ModelSettings, NodeSettings, ScriptedSettings
from tests.support.engine.embedders import make_embedder, make_reranker
from wire.frames import (
    Admitted,
    Cancel,
    Embed,
    Finished,
    Frame,
    Generate,
    GenerationParams,
    MemoryLimits,
    Message,
    Refusal,
    Vectors,
)
from wire.refusals import RefusalCode
from wire.units import GIB

ROOMY = MemoryLimits(100 * GIB, 100 * GIB, GIB, "static")
CONTEXT = 96
DIMENSIONS = 128
TEXTS = ("one", "another text about rivers", "one")
Play = Callable[[str, str], "Player"]


class Player:
    """One engine with one model, and the frames that it sent."""

    def __init__(self, engine: Engine, model: str) -> None:
        self.engine = engine
        self.model = model
        self.number = 0
        self.sent: list[Frame] = []
        self.pass_frame(ROOMY)

    def pass_frame(self, frame: Frame) -> None:
        """Pass a frame to the engine, and tokenize it if the engine asks for that."""
        work = self.engine.prepare(frame)
        if work is not None:
            self._collect(self.engine.handle(work, time.monotonic()))

    def _collect(self, answers: Collection[Frame | UntokenizedPrompt]) -> None:
        for answer in answers:
            if isinstance(answer, UntokenizedPrompt):
                self._collect(self.engine.handle(answer.tokenize(), time.monotonic()))
            else:
                self.sent.append(answer)

    def ask(self, *texts: str, ids: tuple[tuple[int, ...], ...] = (), model: str = "", **fields: Any) -> list[Frame]:
        """Send a request, and return its frames when it has ended."""
        self.number += 1
        self.pass_frame(Embed(self.number, self.number, "r", model or self.model, texts, ids, **fields))
        return self.finish(self.number)

    def finish(self, number: int) -> list[Frame]:
        """Step until a request has ended, and return its frames."""
        deadline = time.monotonic() + 60
        while not any(_ends(frame, number) for frame in self.sent):
            assert time.monotonic() < deadline, "the request does not end"
            self.sent += chain.from_iterable(self.engine.step(time.monotonic()))
        return [frame for frame in self.sent if getattr(frame, "request", None) == number]

    def vectors(self, *texts: str, **fields: Any) -> np.ndarray:
        """Return the vectors of a request by place."""
        first, *parts, last = self.ask(*texts, **fields)
        assert isinstance(first, Admitted)
        assert isinstance(last, Finished)
        assert first.prompt_tokens == last.prompt_tokens > 0
        assert last.completion_tokens == 0
        found: dict[int, np.ndarray] = {}
        for part in parts:
            assert isinstance(part, Vectors)
            rows = np.frombuffer(part.data, "<f4").reshape(len(part.places), -1)
            assert not found.keys() & set(part.places)
            found |= dict(zip(part.places, rows, strict=True))
        return np.stack([found[place] for place in range(len(found))])

    def refusal(self, *texts: str, **fields: Any) -> tuple[RefusalCode, str]:
        """Return the code and the text of the refusal of a request."""
        (answer,) = self.ask(*texts, **fields)
        assert isinstance(answer, Refusal)
        return answer.refused.code, answer.refused.message


def _ends(frame: Frame, number: int) -> bool:
    return isinstance(frame, Finished | Refusal) and frame.request == number


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    make_embedder(root / "embed" / "m", max_position_embeddings=CONTEXT, is_matryoshka=True)
    make_reranker(root / "rerank" / "m", max_position_embeddings=CONTEXT)
    return root


@pytest.fixture
def play(folders: Path) -> Iterator[Play]:
    players: list[Player] = []

    def start(engine: str, kind: str) -> Player:
        embeds = kind == "embed"
        scripted = ScriptedSettings(model="m", dimensions=DIMENSIONS * embeds, reranks=not embeds, max_context=CONTEXT)
        settings = NodeSettings(
            engine=EngineSettings(kind=engine, scripted=scripted),
            models=ModelSettings(
                folders=(str(folders / kind),), use_huggingface_cache=False, trial=False, profile="off"
            ),
        )
        players.append(Player(import_builder(engine)(settings, CrashRecorder()), "m"))
        return players[-1]

    yield start
    for one in players:
        one.engine.close()


@pytest.mark.parametrize("engine", KINDS)
def test_each_text_has_one_vector_of_the_length_1(play: Play, engine: str):
    player = play(engine, "embed")
    vectors = player.vectors(*TEXTS)
    assert vectors.shape == (len(TEXTS), DIMENSIONS)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1.0, abs=1e-5)
    assert vectors[0] == pytest.approx(vectors[2], abs=1e-6)
    assert np.abs(vectors[0] - vectors[1]).max() > 1e-3
    assert player.vectors("one", dimensions=16).shape == (1, 16)
    assert player.vectors(ids=((5, 6), (7,))).shape == (2, DIMENSIONS)
    assert player.engine.gate.checks[GateSite.EMBED] >= 3


@pytest.mark.parametrize("engine", KINDS)
def test_each_document_has_one_score_from_0_to_1(play: Play, engine: str):
    player = play(engine, "rerank")
    scores = player.vectors(*TEXTS, query="which rivers")
    assert scores.shape == (len(TEXTS), 1)
    assert (scores >= 0).all()
    assert (scores <= 1).all()
    assert scores[0] == pytest.approx(scores[2], abs=1e-6)
    assert abs(scores[0, 0] - scores[1, 0]) > 1e-4
    other = player.vectors(*TEXTS, query="one text")
    assert np.abs(other - scores).max() > 1e-4
    assert player.engine.gate.checks[GateSite.EMBED] >= 2


@pytest.mark.parametrize("kind", ["embed", "rerank"])
@pytest.mark.parametrize("engine", KINDS)
def test_a_long_text_is_refused_with_both_numbers_or_cut(play: Play, engine: str, kind: str):
    player, query = play(engine, kind), "who" if kind == "rerank" else ""
    text = "word " * 2 * CONTEXT
    code, message = player.refusal("x", text, query=query)
    assert code is RefusalCode.CONTEXT
    assert str(CONTEXT) in message
    assert "truncate" in message
    assert len(player.vectors("x", text, query=query, truncate=True)) == 2


@pytest.mark.parametrize("kind", ["embed", "rerank"])
@pytest.mark.parametrize("engine", KINDS)
def test_a_request_for_another_kind_names_the_route(play: Play, engine: str, kind: str):
    player = play(engine, kind)
    route = {"embed": "/v1/embeddings", "rerank": "/v1/rerank"}[kind]
    code, message = player.refusal("x", query="" if kind == "rerank" else "who")
    assert code is RefusalCode.UNSUPPORTED
    assert route in message
    player.number += 1
    chat = (Message("user", "hello"),)
    player.pass_frame(Generate(player.number, player.number, "r", "m", chat, GenerationParams(), 0))
    (answer,) = player.finish(player.number)
    assert isinstance(answer, Refusal)
    assert route in answer.refused.message
    assert player.engine.report(0.0).models[0].features == (kind,)


@pytest.mark.parametrize("kind", ["embed", "rerank"])
@pytest.mark.parametrize("engine", KINDS)
def test_without_room_nothing_runs_and_nothing_stays_reserved(play: Play, engine: str, kind: str):
    player, query = play(engine, kind), "who" if kind == "rerank" else ""
    player.vectors("warm", query=query)
    player.pass_frame(MemoryLimits(100 * GIB, 1, GIB, "leases"))
    code, _ = player.refusal(*TEXTS, query=query)
    assert code is RefusalCode.NO_ROOM
    assert player.engine.report(0.0).memory.reserved == 0


@pytest.mark.parametrize("ids", [(), ((),)])
@pytest.mark.parametrize("engine", KINDS)
def test_a_request_without_a_text_is_refused(play: Play, engine: str, ids: tuple[tuple[int, ...], ...]):
    player = play(engine, "embed")
    assert player.refusal(ids=ids)[0] is RefusalCode.INVALID
    assert len(player.vectors("x")) == 1


@pytest.mark.parametrize("engine", KINDS)
def test_an_unknown_model_and_a_cancelled_request(play: Play, engine: str):
    player = play(engine, "embed")
    assert player.refusal("x", model="none")[0] is RefusalCode.NO_MODEL
    player.vectors("warm")
    player.number += 1
    player.pass_frame(Embed(player.number, player.number, "r", "m", TEXTS))
    player.pass_frame(Cancel(player.number))
    while (due := player.engine.next_step_at(time.monotonic())) is not None and due <= time.monotonic():
        player.sent += chain.from_iterable(player.engine.step(time.monotonic()))
    last = [frame for frame in player.sent if getattr(frame, "request", None) == player.number]
    assert [type(frame) for frame in last] == [Admitted]
    assert player.engine.report(0.0).memory.reserved == 0
