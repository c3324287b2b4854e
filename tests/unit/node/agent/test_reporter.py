"""Parts of a node's report."""

import pytest

from node.agent import reporter
from node.agent.reporter import shorten_report
from wire.codec import encode
from wire.frames import Report
from wire.report import EngineState, Memory, Model


def build_report(count: int, *loaded: int) -> Report:
    models = tuple(Model(f"model-{number:03}", loaded=number in loaded) for number in range(count))
    return Report(1, Memory(), EngineState("x", "ready"), models)


def list_models(report: Report) -> list[int]:
    return [int(model.name.removeprefix("model-")) for model in report.models]


def test_a_report_has_at_most_so_many_models_and_the_loaded_ones_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reporter, "MAX_MODELS", 4)
    whole = build_report(4, 3)
    assert shorten_report(whole) is whole
    assert list_models(shorten_report(build_report(5, 4, 2))) == [2, 4, 0, 1]


def test_a_report_loses_a_quarter_of_its_models_until_its_bytes_fit(monkeypatch: pytest.MonkeyPatch):
    whole = build_report(16, 15)
    monkeypatch.setattr(reporter, "MAX_REPORT_BYTES", len(encode(whole)))
    assert shorten_report(whole) is whole
    monkeypatch.setattr(reporter, "MAX_REPORT_BYTES", len(encode(whole)) - 1)
    assert list_models(shorten_report(whole)) == [15, *range(11)]
    monkeypatch.setattr(reporter, "MAX_REPORT_BYTES", len(encode(build_report(9, 0))))
    assert list_models(shorten_report(whole)) == [15, *range(8)]
    monkeypatch.setattr(reporter, "MAX_REPORT_BYTES", 1)
    assert shorten_report(whole).models == ()
