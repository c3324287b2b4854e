"""Every registered kind × every route: a kind whose gate does not check a route fails here."""

import resource
import time
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path

import pytest

from node.engine.memory.gate import GateSite
from node.engine.process.crash_recorder import CrashRecorder
from node.engine.process.interface import ROUTES, Engine, EngineKindError, import_builder
from node.engine.process.kinds import KINDS
from node.engine.requests.tokenize_admission import UntokenizedPrompt
from node.settings import EngineSettings, ModelSettings, NodeSettings, ScriptedSettings
from tests.models import EMBEDDED
from tests.support.engine.embedders import make_embedder, make_reranker
from wire.frames import Admitted, Cancel, Embed, Frame, Generate, GenerationParams, MemoryLimits, Message, Refusal
from wire.refusals import RefusalCode
from wire.units import GIB

BRIEF = GenerationParams(max_tokens=8)
FITS = MemoryLimits(100 * GIB, 100 * GIB, GIB, "static")
MAKE = {
    "chat": lambda model, number: Generate(number, number, "r", model, (Message("user", "hi"),), BRIEF, 0),
    "completions": lambda model, number: Generate(number, number, "r", model, (), BRIEF, 0, text="hi there " * 9),
    "embeddings": lambda model, number: Embed(number, number, "r", model, ("hi there " * 9, "you")),
    "rerank": lambda model, number: Embed(number, number, "r", model, ("hi there " * 9, "you"), query="who"),
}
JOINS = {"chat", "completions"}
"""Routes whose rows decode."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folder of a model for each route."""
    root = tmp_path_factory.mktemp("models")
    others = {"embeddings": make_embedder(root / "embeddings"), "rerank": make_reranker(root / "rerank")}
    return others | dict.fromkeys(JOINS, EMBEDDED)


@pytest.fixture
def make(folders: dict[str, Path]) -> Callable[[str, str], Engine]:
    """Return the function that makes an engine of a kind with a model for a route."""
    return lambda kind, route: made(kind, route, folders)


def made(kind: str, route: str, folders: Mapping[str, Path]) -> Engine:
    scripted = ScriptedSettings(dimensions=8 * (route == "embeddings"), reranks=route == "rerank")
    settings = NodeSettings(
        engine=EngineSettings(kind=kind, scripted=scripted),
        models=ModelSettings(folders=(str(folders[route]),), use_huggingface_cache=False, trial=False, profile="off"),
    )
    return import_builder(kind)(settings, CrashRecorder())


def ask(engine: Engine, route: str, number: int) -> list[Frame]:
    """Pass a request to the engine, step until its first frame, and return that frame."""
    work = engine.prepare(MAKE[route](engine.report(0.0).models[0].name, number))
    assert work is not None
    said: list[Frame] = []
    for answer in engine.handle(work, 0.0):
        said += engine.handle(answer.tokenize(), 0.0) if isinstance(answer, UntokenizedPrompt) else [answer]  # pyright: ignore
    while not said:
        said += chain.from_iterable(engine.step(0.0))
    return said[:1]


def refused_later(engine: Engine) -> Frame:
    """Step until the engine refuses the waiting request. It may wait first for the end of a recent peak."""
    begun = time.monotonic()
    while time.monotonic() < begun + 30:
        for frame in chain.from_iterable(engine.step(time.monotonic() - begun)):
            return frame
        time.sleep(0.05)
    raise AssertionError("the engine does not refuse the request")


def test_every_route_has_a_request():
    assert set(MAKE) == set(ROUTES)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_passes_before_the_first_limits(make: Callable[[str, str], Engine], kind: str, route: str):
    engine = make(kind, route)
    (answer,) = ask(engine, route, 1)
    assert isinstance(answer, Refusal)
    assert answer.refused.code is RefusalCode.NOT_READY
    assert answer.refused.retry_after
    assert engine.report(0.0).memory.armed is False


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_prefill_and_every_join_passes_the_gate(make: Callable[[str, str], Engine], kind: str, route: str):
    engine = make(kind, route)
    engine.handle(FITS, 0.0)
    assert isinstance(ask(engine, route, 1)[0], Admitted)
    assert engine.report(0.0).memory.armed is True
    while (due := engine.next_step_at(0.0)) is not None and due <= 0.0:
        list(engine.step(0.0))
    assert engine.gate.checks[GateSite.PREFLIGHT] == 1 + (kind == "mlx"), "the first prompt loads a tokenizer there"
    assert engine.gate.checks[GateSite.PREFILL] == (route in JOINS)
    assert engine.gate.checks[GateSite.JOIN] == (route in JOINS)
    assert engine.gate.checks[GateSite.EMBED] == (route not in JOINS)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_is_refused_at_admission_or_before_a_forward(
    make: Callable[[str, str], Engine], kind: str, route: str
):
    engine = make(kind, route)
    engine.handle(FITS, 0.0)
    assert isinstance(ask(engine, route, 1)[0], Admitted)
    engine.handle(Cancel(1), 0.0)
    assert isinstance(ask(engine, route, 3)[0], Admitted)
    engine.handle(MemoryLimits(100 * GIB, 1, GIB, "leases"), 0.0)
    late = refused_later(engine)
    (early,) = ask(engine, route, 2)
    for answer in (late, early):
        assert isinstance(answer, Refusal)
        assert answer.refused.code is RefusalCode.NO_ROOM
    site = GateSite.PREFILL if route in JOINS else GateSite.EMBED
    assert engine.gate.refusals[site] >= 1
    assert engine.gate.refusals[GateSite.PREFLIGHT] == 1
    assert set(engine.gate.refusals) == {site, GateSite.PREFLIGHT}
    assert engine.report(0.0).memory.reserved == 0


def test_an_unknown_kind_is_named_with_those_that_exist():
    with pytest.raises(EngineKindError, match="scripted"):
        import_builder("metal")


def test_a_limit_of_open_files_below_that_of_mlx_lm_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """mlx-lm sets the limits 2048 and 4096 when it is imported."""
    (tmp_path / "limited_engine.py").write_text("raise ValueError('not allowed to raise maximum limit')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(KINDS, "limited", "limited_engine")
    with pytest.raises(ValueError, match="not allowed"):
        import_builder("limited")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 1024))
    with pytest.raises(EngineKindError, match=r"the hard limit is 1024 open files, and mlx-lm needs 4096: raise it"):
        import_builder("limited")
