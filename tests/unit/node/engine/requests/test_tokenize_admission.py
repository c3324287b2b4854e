import itertools
import json
import random
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from node.engine.requests.prepared import PreparedRequest
from node.engine.requests.tokenize_admission import (
    TokenizeResult,
    UntokenizedPrompt,
    count_text_bytes,
    refuse_too_long,
)
from node.engine.requests.tokenize_queue import TokenizeQueue
from node.engine.text.tokenizer import LONG_TEXT_CHARS
from node.engine.text.tokenizer_errors import TooLong
from node.engine.text.tokenizer_loader import load
from tests import models
from tests.support.engine.text_engine import ROOMY, Driver
from wire.capacity.arithmetic import (
    TOKENIZE_BYTES_PER_TOKEN,
    TOKENIZE_SLICE_CHARS,
    TOKENIZER_CODE_BYTES,
    TOKENIZER_GUIDE_FACTOR,
    TOKENIZER_LOAD_FACTOR,
    UNCHECKED_TOKENIZE_BYTES,
    estimate_tokenize_bytes,
)
from wire.capacity.fairness import WeightedKey
from wire.frames import (
    CountTokens,
    Embed,
    Finished,
    Generate,
    GenerationParams,
    GrammarSpec,
    MemoryLimits,
    Message,
    Ping,
    Refusal,
    ToolCall,
)
from wire.refusals import RefusalCode
from wire.report import Memory
from wire.units import GIB, MIB

WORDS = "The whole history of the house was written down by its cook. "
LONG = WORDS * 60


def asked(driver: Driver, content: str, number: int = 1, **params: object) -> Generate:
    given = GenerationParams(max_tokens=4, temperature=0.0, **params)  # type: ignore[arg-type]
    return Generate(number, number, "r", driver.default, (Message("user", content),), given, 0)


@pytest.fixture
def driver(tiny_model: Callable[..., Path]) -> Driver:
    made = Driver(tiny_model("llama"))
    made.answer("Hello!", GenerationParams(max_tokens=1))  # loads model and tokenizer
    return made


def unread(driver: Driver, content: str = LONG, number: int = 9) -> UntokenizedPrompt:
    work = driver.engine.prepare(asked(driver, content, number))
    assert isinstance(work, UntokenizedPrompt)
    return work


def reserved(driver: Driver) -> int:
    return driver.engine.report(time.monotonic()).memory.reserved


def tight(driver: Driver, room: int) -> None:
    """Set limits that leave `room` bytes of headroom."""
    driver.take(MemoryLimits(8 * GIB, 8 * GIB, 0, "static"))
    room_now = driver.engine.report(time.monotonic()).memory.headroom
    assert room_now is not None
    driver.take(MemoryLimits(8 * GIB, 8 * GIB - room_now + room, 0, "static"))


@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_every_byte_that_reading_takes_is_counted(text: int, files: int):
    whole = (
        TOKENIZE_BYTES_PER_TOKEN * text
        + (TOKENIZER_LOAD_FACTOR + TOKENIZER_GUIDE_FACTOR) * files
        + TOKENIZER_CODE_BYTES
    )
    assert estimate_tokenize_bytes(text, files, loads=True, guides=True) == (
        whole if whole > UNCHECKED_TOKENIZE_BYTES else 0
    )
    assert (
        estimate_tokenize_bytes(text, files)
        == estimate_tokenize_bytes(text)
        <= estimate_tokenize_bytes(text, files, loads=True)
    )
    assert estimate_tokenize_bytes(text) in (0, TOKENIZE_BYTES_PER_TOKEN * text)


def test_all_text_of_a_request_is_counted():
    call = ToolCall("c", "name", "{}")
    messages = (Message("user", "ä" * 10, "bob", (call,), "", "thought"), Message("tool", "xyz"))
    everything = 20 + 3 + 4 + 2 + 7 + 3
    assert count_text_bytes(CountTokens(1, "m", messages, 0, tools="[]")) == everything + 2
    assert (
        count_text_bytes(Generate(1, 1, "r", "m", messages, GenerationParams(), 0, text="text", ids=(1, 2, 3)))
        == everything + 4 + 3
    )
    assert (
        count_text_bytes(CountTokens(1, "m", (Message("user", "\ud800" * 3),), 0)) >= 3
    )  # a lone surrogate also counts
    assert count_text_bytes(Embed(1, 1, "r", "m", texts=("ä", "xyz"))) == 2 + 3
    assert count_text_bytes(Embed(1, 1, "r", "m", ids=((1, 2), (3,)))) == 3
    assert count_text_bytes(Embed(1, 1, "r", "m", texts=("a", "b", "c"), query="ab")) == 3 + 3 * 2


def test_short_prompts_are_read_at_once_and_long_ones_when_there_is_room(driver: Driver):
    assert not isinstance(driver.engine.prepare(asked(driver, "Hello!")), UntokenizedPrompt)
    long = unread(driver)
    assert UNCHECKED_TOKENIZE_BYTES < long.need == TOKENIZE_BYTES_PER_TOKEN * len(LONG)
    assert driver.answer(LONG, GenerationParams(max_tokens=2))  # and the tokenized prompt is answered


def test_the_first_prompt_of_a_model_pays_for_its_tokenizer(tiny_model: Callable[..., Path]):
    driver = Driver(tiny_model("llama"))
    files, text = (tiny_model("llama") / "tokenizer.json").stat().st_size, "a" * 4_000
    later = TOKENIZE_BYTES_PER_TOKEN * len(text)
    first = driver.engine.parts.preparer.compute_need_bytes(asked(driver, text))
    assert first == later + TOKENIZER_LOAD_FACTOR * files + TOKENIZER_CODE_BYTES
    guided = asked(driver, text, grammar=GrammarSpec("regex", "a+"))
    assert driver.engine.parts.preparer.compute_need_bytes(guided) == first + TOKENIZER_GUIDE_FACTOR * files
    driver.answer("Hi", GenerationParams(max_tokens=2, grammar=GrammarSpec("regex", "a+")))
    assert driver.engine.parts.preparer.compute_need_bytes(guided) == later


def test_what_is_being_read_is_promised_until_it_is_in_tokens(driver: Driver):
    work, before = unread(driver), reserved(driver)
    assert list(driver.engine.handle(work, time.monotonic())) == [work]
    assert reserved(driver) == before + work.need
    assert driver.engine.report(time.monotonic()).waiting == 1
    done = work.tokenize()
    assert reserved(driver) == before + work.need  # the tokenizing thread commits nothing and ends nothing
    driver.put(done)
    driver.end(9)
    assert reserved(driver) == before


def test_a_long_prompt_without_room_is_refused_unread(driver: Driver):
    work = unread(driver)
    tight(driver, work.need // 2)
    before = reserved(driver)
    driver.put(work)
    refusal = driver.ended(9)
    assert isinstance(refusal, Refusal)
    assert refusal.refused.code is RefusalCode.NO_ROOM
    assert refusal.refused.numbers is not None
    assert refusal.refused.numbers.estimate == work.need
    assert refusal.prompt_tokens is None  # they were not counted
    assert reserved(driver) == before
    driver.take(ROOMY)
    assert isinstance(driver.end(driver.ask("Hello!", GenerationParams(max_tokens=1))), Finished)


def test_two_that_fit_only_one_by_one_are_not_read_together(driver: Driver):
    first, second = unread(driver, number=8), unread(driver, number=9)
    tight(driver, first.need + second.need // 2)
    assert list(driver.engine.handle(first, time.monotonic())) == [first]
    driver.put(second)
    refusal = driver.ended(9)
    assert isinstance(refusal, Refusal)
    assert refusal.refused.code is RefusalCode.NO_ROOM


def test_a_prompt_that_can_never_be_tokenized_in_the_cap_is_refused(driver: Driver):
    driver.take(MemoryLimits(600 * MIB, 600 * MIB, 0, "static"))
    work = driver.engine.prepare(CountTokens(9, driver.default, (Message("user", WORDS * 200_000),), 0))
    assert isinstance(work, UntokenizedPrompt)
    driver.put(work)
    refusal = driver.ended(9)
    assert isinstance(refusal, Refusal)
    assert refusal.refused.code is RefusalCode.TOO_LARGE
    assert "shorten the prompt" in refusal.refused.message
    assert reserved(driver) == 0


@pytest.mark.parametrize("size", [1, 7_900_000])
def test_a_text_that_cannot_fit_the_context_is_counted_only_as_far_as_needed(driver: Driver, size: int):
    context = driver.engine.report(0.0).models[0].context
    whole = WORDS * (size // len(WORDS) + 4 * context // 10)
    work = unread(driver, whole)
    assert work.is_long
    assert work.need == estimate_tokenize_bytes(count_text_bytes(work.frame), context=context)
    assert work.need < TOKENIZE_BYTES_PER_TOKEN * (context * 2 + TOKENIZE_SLICE_CHARS) + 16 * len(whole)
    counted: list[int] = []
    tokenizer = driver.tokenizer()
    rust = tokenizer.rust

    class Counting:
        def encode_batch_fast(self, texts: list[str], **kwargs: bool) -> object:
            counted.extend(map(len, texts))
            return rust.encode_batch_fast(texts, **kwargs)  # pyright: ignore

    changed: Any = tokenizer
    changed.rust = Counting()
    driver.put(work)
    refusal = driver.ended(9)
    assert isinstance(refusal, Refusal)
    assert refusal.refused.code is RefusalCode.CONTEXT
    assert f"is {context}: shorten the prompt" in refusal.refused.message
    assert 0 < sum(counted) <= 8 * context + TOKENIZE_SLICE_CHARS
    assert driver.engine.report(0.0).memory.reserved == 0


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "lfm2", "gemma3_text"])
@pytest.mark.parametrize("plain", [False, True])
def test_a_long_text_has_the_same_tokens_as_by_the_whole_tokenizer(architecture: str, plain: bool):
    tokenizer = load(models.path(architecture))
    text = (WORDS + "Ünïcödé 😀\n\n  x=1;" + "\t" * 9) * 400
    assert len(text) > LONG_TEXT_CHARS
    expected = tuple(tokenizer.wrapper.encode(text, add_special_tokens=plain))
    assert tokenizer.encode(text, plain=plain) == expected
    assert tokenizer.encode(text, plain=plain, max_tokens=len(expected)) == expected, (
        "what fits exactly is never refused"
    )


def test_a_prompt_that_fits_exactly_is_not_refused_by_its_slices(driver: Driver):
    tokenizer = driver.tokenizer()
    text = "the " * 160_000
    count = len(tokenizer.encode(text, plain=False))
    assert len(tokenizer.encode(text, plain=False, max_tokens=count)) == count
    assert len(text) > 2 * count, "its slices are counted"
    with pytest.raises(TooLong, match=r"already has \d+ tokens"):
        tokenizer.encode(text, plain=False, max_tokens=count // 2)


def test_short_prompts_pings_and_cancels_wait_for_no_long_text(driver: Driver):
    tokenizer = driver.tokenizer()
    rust, entered, leave, alone = tokenizer.rust, threading.Event(), threading.Event(), threading.Event()

    class Held:
        def encode_batch_fast(self, texts: list[str], **kwargs: bool) -> object:
            entered.set()
            if not leave.wait(10.0):
                alone.set()
            return rust.encode_batch_fast(texts, **kwargs)  # pyright: ignore

    changed: Any = tokenizer
    changed.rust = Held()
    long = unread(driver, WORDS * 2_000)
    reader = threading.Thread(target=long.tokenize)
    reader.start()
    try:
        assert entered.wait(20.0), "a long text is being tokenized"
        assert isinstance(driver.engine.prepare(asked(driver, "Hello!", 11)), PreparedRequest), (
            "a short prompt is prepared"
        )
        usual = unread(driver, LONG, 12)
        assert not usual.is_long
        assert isinstance(usual.tokenize().work, PreparedRequest), "a prompt of usual length has a thread of its own"
        assert driver.engine.prepare(Ping(1)) is None
        assert not alone.is_set(), "all of it while the long text was being tokenized"
    finally:
        leave.set()
        reader.join(20.0)
    assert not reader.is_alive()


def test_the_io_thread_neither_loads_a_tokenizer_nor_compiles_a_grammar(tiny_model: Callable[..., Path]):
    driver = Driver(tiny_model("llama"))
    first = driver.engine.prepare(asked(driver, "Hi"))
    assert isinstance(first, UntokenizedPrompt)
    assert isinstance(first.tokenize().work, PreparedRequest)
    assert isinstance(driver.engine.prepare(asked(driver, "Hi", 2)), PreparedRequest)
    guided = driver.engine.prepare(asked(driver, "Hi", 3, grammar=GrammarSpec("regex", "a+")))
    assert isinstance(guided, UntokenizedPrompt)


def test_counting_a_long_prompt_passes_the_gate(driver: Driver):
    count = CountTokens(9, driver.default, (Message("user", LONG),), 0)
    work = driver.engine.prepare(count)
    assert isinstance(work, UntokenizedPrompt)
    driver.put(work)
    end = driver.ended(9)
    assert isinstance(end, Finished)
    assert end.prompt_tokens > 600
    assert reserved(driver) == 0


def test_a_cancel_while_a_prompt_is_read_leaves_nothing(driver: Driver):
    work, before = unread(driver), reserved(driver)
    driver.engine.handle(work, time.monotonic())
    driver.cancel(9)
    driver.put(work.tokenize())
    assert driver.said[9] == []
    assert reserved(driver) == before
    early = unread(driver, number=10)
    driver.cancel(10)
    driver.put(early)
    assert driver.said[10] == []
    assert reserved(driver) == before


def test_the_same_request_is_read_once(driver: Driver):
    work = unread(driver)
    assert list(driver.engine.handle(work, time.monotonic())) == [work]
    assert list(driver.engine.handle(work, time.monotonic())) == []
    done = work.tokenize()
    assert isinstance(done, TokenizeResult)
    driver.put(done)
    driver.end(9)


def large_vocabulary(source: Path, folder: Path) -> Path:
    """Return a model's folder with a tokenizer of 60,000 tokens in place of its own."""
    shutil.copytree(source, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    chance, model = random.Random(1), tokenizer["model"]
    pieces, used = [one for one in model["vocab"] if len(one) < 3], {one["id"] for one in tokenizer["added_tokens"]}
    numbers = (number for number in itertools.count(max(model["vocab"].values()) + 1) if number not in used)
    while len(model["vocab"]) < 60_000:
        left, right = chance.choice(pieces), chance.choice(pieces)
        if left + right not in model["vocab"]:
            model["vocab"][left + right] = next(numbers)
            model["merges"].append([left, right])
            pieces += [left + right] * (len(left + right) < 8)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.mark.slow
def test_loading_a_tokenizer_takes_no_more_than_was_promised(tiny_model: Callable[..., Path], tmp_path: Path):
    first, *_ = measured(large_vocabulary(tiny_model("llama"), tmp_path / "large"), 1)
    _, _, promised, taken = first
    assert taken > 20 * MIB, "nothing was measured"
    assert taken <= promised


MEASURE = textwrap.dedent("""
    import json, random, resource, sys
    from pathlib import Path
    from node.engine.requests.preparer import RequestPreparer
    from node.models.catalogue import ModelCatalogue
    from node.settings import ModelSettings
    from wire.frames import Generate, GenerationParams, Message

    library = ModelCatalogue(ModelSettings(folders=(sys.argv[1],), use_huggingface_cache=False))
    library.scan()

    def highest():
        if sys.platform == "darwin":
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        status = Path("/proc/self/status").read_text()  # the other mark is the parent's until it is passed
        return int(status.split("VmHWM:")[1].split()[0]) * 1024

    chance = random.Random(int(sys.argv[2]))
    signs = [chr(one) for one in (*range(32, 127), *range(0x400, 0x460), *range(0x1f600, 0x1f640))]
    kinds = {"words": lambda: "the house of the cook was old and ", "signs": lambda: chance.choice(signs) * 3,
             "spaces": lambda: " " * chance.randrange(40) + "x"}
    door, rows = RequestPreparer(library, lambda found: 10_000_000), []
    for kind, size in (("words", 200), ("words", 30_000), ("signs", 100_000), ("spaces", 150_000), ("words", 300_000)):
        text = ""
        while len(text) < size:
            text += "".join(kinds[kind]() for _ in range(500))
        request = Generate(1, 1, "r", next(iter(library.get_models())), (Message("user", text),), GenerationParams(), 0)
        needed, before = door.compute_need_bytes(request), highest()
        prepared = door.prepare(request)
        assert prepared.ids
        rows.append((kind, len(text), needed, highest() - before))
        del prepared
    print(json.dumps(rows))
""")


def measured(folder: Path, seed: int) -> list[tuple[str, int, int, int]]:
    """Tokenize prompts in a separate process; return kind, characters, reserved bytes and used bytes by the system's
    mark."""
    command = [sys.executable, "-c", MEASURE, str(folder), str(seed)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return [tuple(row) for row in json.loads(run.stdout.splitlines()[-1])]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_reading_takes_no_more_than_was_promised(tiny_model: Callable[..., Path], seed: int):
    rows = measured(tiny_model("llama"), seed)
    assert len(rows) == 5
    assert max(taken for _, _, _, taken in rows) > 20 * MIB, "nothing was measured"
    for kind, size, promised, taken in rows:
        assert taken <= max(promised, UNCHECKED_TOKENIZE_BYTES), (kind, size, promised, taken)


def test_prompts_are_read_in_turns_between_keys(driver: Driver):
    """A key with many grammars, or long texts, delays another key by one of them."""
    queue, order = TokenizeQueue(), list[int]()

    def of(key: str, number: int) -> UntokenizedPrompt:
        frame: Generate | CountTokens = replace(asked(driver, "Hello!", number), weighted_key=WeightedKey(key))
        if number % 2:  # counts also take turns of their key
            frame = CountTokens(number, driver.default, frame.messages, 0, weighted_key=WeightedKey(key))
        return UntokenizedPrompt(frame, 0, lambda: TokenizeResult(number, Finished(number, (), 0, 0)))

    for number in range(5):
        queue.put(of("greedy", number))
    order.append(queue.get().frame.request)
    queue.put(of("other", 10))
    queue.put(of("other", 11))
    order += [queue.get().frame.request for _ in range(6)]
    assert order == [0, 1, 10, 2, 11, 3, 4]
    taken: list[UntokenizedPrompt] = []
    waiting = threading.Thread(target=lambda: taken.append(queue.get()), daemon=True)
    waiting.start()
    queue.put(of("other", 12))
    waiting.join(10)
    assert [one.frame.request for one in taken] == [12]


@pytest.mark.parametrize(("need", "refuses"), [(6 * GIB, False), (6 * GIB + 1, True)])
def test_a_prompt_that_cannot_be_tokenized_on_the_idle_node_has_the_numbers_and_the_next_step(need: int, refuses: bool):
    frame = Generate(1, 1, "r", "tiny", (Message("user", "hi"),), GenerationParams(), 0)
    memory = Memory(current=5 * GIB, headroom=1 * GIB, cap=8 * GIB, ceiling=8 * GIB, margin=2 * GIB, bound_by="setting")
    refused = refuse_too_long(frame, need, memory)
    assert refuse_too_long(frame, need, replace(memory, guard=False)) is None
    if not refuses:
        assert refused is None
        return
    assert refused is not None
    assert refused.message == (
        "2 bytes of text need up to 6.0 GiB for tokenization, this node can give 6.0 GiB: shorten the prompt or raise "
        "memory.cap"
    )
    numbers = refused.numbers
    assert numbers is not None
    assert (numbers.predicted, numbers.estimate, numbers.margin) == (need + 2 * GIB, need, 2 * GIB)
    assert (numbers.ceiling, numbers.cap, numbers.current, numbers.headroom) == (8 * GIB, 8 * GIB, 5 * GIB, 1 * GIB)
