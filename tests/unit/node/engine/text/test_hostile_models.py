"""Hostile model folders: templates that never end or take all memory, expressions that explode."""

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest

from node.engine.embedding.pairs import EncoderPairs
from node.engine.process.crash_recorder import CrashRecord, CrashRecorder, create_page, read_crash_record
from node.engine.process.interface import NativeCallKind
from node.engine.text import chat_template, tokenizer, tokenizer_loader
from node.engine.text.time_limit import Deadline, DeadlineError
from node.engine.text.tokenizer_errors import TemplateFailed, TokenizerError
from node.engine.text.tokenizer_trial import FILE, MAX_RESULTS, TokenizerTrials
from node.engine_process.quarantine import Quarantine
from tests.support.engine import vocabulary
from tests.support.engine.text_engine import Driver
from tests.support.processes import ROOT
from tests.unit.node.engine.text.test_tokenizer import ask
from wire.frames import Embed, Generate, GenerationParams, Message, ModelBan, RestoreModels
from wire.refusals import RefusalCode
from wire.units import MIB

FOREVER = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"
    "{% endfor %}{{ messages[0]['content'] }}"
)
GREEDY = "{% set ns = namespace(x='ab') %}{% for a in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}"
EXPLODES = "(?:(?:a|a|a)+)+$"


def a_model(folder: Path, template: str | None = None, expression: str = "") -> Path:
    made = vocabulary.byte_level(folder)
    if template is not None:
        vocabulary.configure(made, chat_template=template)
    if expression:
        file = made / "tokenizer.json"
        written = json.loads(file.read_text())
        written["pre_tokenizer"] = {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        }
        file.write_text(json.dumps(written))
    return made


@pytest.mark.slow
def test_a_model_is_tried_once_and_used_when_nothing_is_wrong(tmp_path: Path):
    model = a_model(tmp_path / "model")
    trials = TokenizerTrials(tmp_path / "kept")
    assert trials.compute_need_bytes("f1", 1000) > 512 * MIB, "the gate reserves it"
    trials.run(model, "f1", 1000)
    assert trials.compute_need_bytes("f1", 1000) == 0
    shutil.rmtree(model)
    trials.run(model, "f1", 1000)
    TokenizerTrials(tmp_path / "kept").run(model, "f1", 1000)
    results = tmp_path / "kept" / FILE
    stored = json.loads(results.read_text())
    assert f"transformers {version('transformers')}" in stored["versions"]
    for former in (stored | {"versions": stored["versions"].replace("transformers", "transformers 1.")}, ["f1"]):
        results.write_text(json.dumps(former))
        assert TokenizerTrials(tmp_path / "kept").compute_need_bytes("f1", 1000) > 0, "other versions are tried"


@pytest.mark.slow
def test_a_tokenizer_that_cannot_be_loaded_passes_its_trial_and_the_oldest_results_are_forgotten(tmp_path: Path):
    model = a_model(tmp_path / "model")
    (model / "tokenizer.json").write_text("{")
    trials = TokenizerTrials(tmp_path)
    trials.run(model, "f1", 1000)
    assert (trials.find_cause("f1"), trials.compute_need_bytes("f1", 1000)) == ("", 0)
    file = tmp_path / FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | {"passed": [f"o{n}" for n in range(MAX_RESULTS)]}))
    later = TokenizerTrials(tmp_path)
    later.run(model, "f1", 1000)
    assert [later.compute_need_bytes(name, 1000) > 0 for name in ("o0", "o1", "f1")] == [True, False, False]
    assert len(json.loads(file.read_text())["passed"]) == MAX_RESULTS


@pytest.mark.slow
def test_a_crash_of_a_trial_names_its_signal(tmp_path: Path):
    model = a_model(tmp_path / "model", template=FOREVER)
    trials = TokenizerTrials(None, cpu=60)
    with ThreadPoolExecutor(1) as thread:
        trial = thread.submit(trials.run, model, "f1", 1000)
        while not (children := [one for one in psutil.Process().children() if str(model) in one.cmdline()]):
            assert not trial.done()
        children[0].send_signal(signal.SIGSEGV)
        with pytest.raises(TokenizerError, match="the trial of its template and tokenizer ended by SIGSEGV"):
            trial.result(60)
    trials.run(a_model(tmp_path / "other"), "f2", 1000)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "cpu", "said"),
    [
        ({"template": FOREVER}, 1, "took more than 1 s"),
        ({"expression": EXPLODES}, 6, "its tokenizer fails on prompts of 20 kB"),
        ({"template": GREEDY}, 6, "limit [0-9]+"),
    ],
    ids=["a loop", "an expression", "memory"],
)
def test_what_means_harm_ends_in_its_process_and_is_named(tmp_path: Path, how: dict[str, str], cpu: int, said: str):
    model = a_model(tmp_path / "model", **how)
    trials = TokenizerTrials(tmp_path / "kept", cpu=cpu, memory=900 * MIB)
    began = time.monotonic()
    with pytest.raises(TokenizerError, match=said):
        trials.run(model, "f1", 1000)
    assert time.monotonic() - began < 60
    with pytest.raises(TokenizerError, match=said):  # and is not tried again
        trials.run(model, "f1", 1000)


@pytest.mark.parametrize("length", [10_000, tokenizer.LONG_TEXT_CHARS + 1000], ids=["short", "long"])
def test_a_panic_of_the_native_tokenizer_fails_its_request_alone(tmp_path: Path, length: int):
    harmful = tokenizer_loader.load(a_model(tmp_path / "model", expression=EXPLODES))
    with pytest.raises(TemplateFailed, match=r"the tokenizer failed: PanicException: .*retry-limit"):
        harmful.tokenize_request(ask(Message("user", "a" * length + "!")))
    with pytest.raises(TemplateFailed, match=r"the tokenizer failed: PanicException: .*retry-limit"):
        harmful.count_tokens(ask(Message("user", "a" * length + "!")))
    pairs = EncoderPairs(harmful, Embed(1, 1, "a", "m", ("a",), query="a"), 512)
    with pytest.raises(TemplateFailed, match=r"the tokenizer failed: PanicException: .*retry-limit"):
        pairs.tokenize("a" * length + "!")
    assert pairs.tokenize("a").ids
    assert harmful.tokenize_request(ask(Message("user", "a"))).ids


def test_a_template_that_never_ends_fails_its_request_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chat_template, "RENDER_TIMEOUT_SECONDS", 0.2)
    harmful = tokenizer_loader.load(a_model(tmp_path / "model", FOREVER))
    began = time.monotonic()
    with pytest.raises(TemplateFailed, match="the chat template took more than"):
        harmful.tokenize_request(ask())
    assert time.monotonic() - began < 5
    assert sum(range(1000)) == 499_500, "nothing is raised later"


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Run without garbage collection, because an exception in a callback of the collector, such as Hypothesis', is only
    reported."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
def spin_until(until: float) -> None:
    """Compute until a monotonic time."""
    while time.monotonic() < until:
        pass


def test_a_deadline_raises_inside_its_context_or_not_at_all():
    def long() -> None:
        with Deadline(0.05, "too long"):
            spin_until(time.monotonic() + 3)

    threads, began = threading.active_count(), time.monotonic()  # tests before may have left threads
    with pytest.raises(DeadlineError, match="too long"):
        long()
    assert time.monotonic() - began < 2, "the code is interrupted, and not only its end refused"
    for _ in range(300):  # ends at about its expiry; in both cases nothing is raised after it
        try:
            with Deadline(0.001, "late"):
                spin_until(time.monotonic() + 0.001)
        except DeadlineError:
            pass
        for _ in range(50):
            pass
    late = Deadline(30, "never")
    with late:
        pass
    late.expire()  # like its timer when it could no longer be cancelled
    assert sum(range(1000)) == 499_500, "nothing is raised"
    assert threading.active_count() < threads + 50


def test_an_expired_deadline_leaves_no_mark_of_an_exception_in_the_interpreter():
    script = (
        "import sys\n"
        "from node.engine.text.time_limit import Deadline, DeadlineError\n"
        "try:\n"
        "    with Deadline(0.05, 'too long'):\n"
        "        while True: pass\n"
        "except DeadlineError: pass\n"
        "sys.setprofile(lambda *_: None)\n"
        "(lambda: None)()\n"  # with the mark this call never returns
        "sys.setprofile(None)\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=60)


def test_a_deadline_earlier_than_one_in_force_raises_in_time_and_starts_no_thread():
    def run_ten_seconds(threads: list[int]) -> None:
        with Deadline(0.05, "earlier"):
            threads.append(threading.active_count())
            spin_until(time.monotonic() + 10)

    with Deadline(30, "later"):
        time.sleep(0.2)  # the thread of the deadlines then sleeps until the later one, which has no event
        threads = [threading.active_count()]
        with pytest.raises(DeadlineError, match="earlier"):
            run_ten_seconds(threads)
        assert threads == [threads[0]] * 2


def test_a_hang_is_blamed_on_the_call_that_has_lasted_longest_and_a_crash_on_the_forward():
    page = create_page()
    try:
        recorder = CrashRecorder(page)
        with recorder.record_tokenization("hostile", 7):
            recorder.begin(NativeCallKind.DECODE, "good")
            crashed, hung = read_crash_record(page), read_crash_record(page, hung=True)
            assert recorder.find_oldest_tokenization() == hung
        assert (crashed and crashed.model, hung and (hung.doing, hung.request, hung.model)) == (
            "good",
            (NativeCallKind.READ, 7, "hostile"),
        )
        recorder.end()
        assert (
            read_crash_record(page, hung=True) is read_crash_record(page) is recorder.find_oldest_tokenization() is None
        )
        with recorder.record_tokenization("a"):
            assert (read_crash_record(page) or CrashRecord(NativeCallKind.LOAD, 0, "")).model == "a", (
                "no forward: a prompt was the last thing"
            )
    finally:
        os.close(page)


def test_more_threads_than_slots_are_no_error():
    recorder, models = CrashRecorder(), []

    def look(number: int) -> None:
        with recorder.record_tokenization(f"m{number}"):
            models.append(number)

    for number in range(9):
        thread = threading.Thread(target=look, args=(number,))
        thread.start()
        thread.join()
    assert len(models) == 9


def test_a_model_whose_prompts_hang_the_engine_twice_is_kept_out():
    quarantine = Quarantine()
    assert not quarantine.record_crash("hostile", 1.0)
    assert quarantine.record_crash("hostile", 100.0)
    (ban,) = quarantine.list_bans(101.0)
    assert ban.model == "hostile"
    assert "template" in ban.cause


@pytest.mark.slow
def test_a_model_is_tried_before_its_tokenizer_is_loaded(tmp_path: Path, tiny_model: Callable[..., Path]):
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "harmful")
    vocabulary.configure(folder, chat_template=FOREVER)
    driver = Driver(folder, trials=TokenizerTrials(None, cpu=1))
    door = driver.engine.parts.preparer
    frame = Generate(1, 1, "r", driver.default, (Message("user", "hi"),), GenerationParams(max_tokens=1), 0)
    assert door.compute_need_bytes(frame) > 512 * MIB
    assert not door.can_prepare_inline(frame)
    prepared = door.prepare(frame)
    assert prepared.refused is not None
    assert (prepared.refused.code, "took more than 1 s" in prepared.refused.message) == (RefusalCode.LOAD_FAILED, True)
    assert not door.tokenizers
    (model,) = [one for one in driver.engine.report(0.0).models if one.name == driver.default]
    assert "took more than 1 s" in model.cause, "an engine reports why a model is not used"


def test_a_model_that_is_kept_out_is_not_even_read(tiny_model: Callable[..., Path]):
    driver = Driver(tiny_model("llama"))
    driver.take(RestoreModels((), (ModelBan(driver.default, 600.0, "its tokenizer hangs"),)))
    frame = Generate(1, 1, "r", driver.default, (Message("user", "hi"),), GenerationParams(max_tokens=1), 0)
    prepared = driver.engine.parts.preparer.prepare(frame)
    assert prepared.refused is not None
    assert "its tokenizer hangs" in prepared.refused.message
    assert not driver.engine.parts.preparer.tokenizers
