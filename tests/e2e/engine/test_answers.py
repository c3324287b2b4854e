"""Real models in a real pool: answers word for word, refusals of the gate, bad input, request options.

The tiny models were trained on a few answers. Every answer here is compared with the trained text.
"""

import json
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.lib.streaming.chat import ChatCompletionStreamState

from tests import models
from tests.effort import IS_NIGHTLY, thin_cases
from tests.models.conversations import TOOL_USES, TOOLS
from tests.support.cluster.engine_pool import (
    GREETING,
    HELLO,
    MLX,
    api,
    at_rest,
    cordoned,
    forwards_of_one,
    greets,
    link,
    loaded,
    said,
    spoiled,
)
from tests.support.processes import Pool, pool, until
from wire.units import MIB

pytestmark = pytest.mark.slow

TRAINED = ("llama", "qwen3", "lfm2")
NODES = ("studio", "macbook")
AT_ONCE = 32 if IS_NIGHTLY else 16
CONTEXT = 32768
"""Context of the tiny models, in tokens."""


def write(file: str, text: str) -> Callable[[Path], object]:
    """Spoil a model by overwriting one of its files."""
    return lambda folder: (folder / file).write_text(text)


def configure(file: str, **changed: object) -> Callable[[Path], object]:
    """Spoil a model by changing values in one of its JSON files."""

    def spoil(folder: Path) -> None:
        path = folder / file
        path.write_text(json.dumps(json.loads(path.read_text()) | changed))

    return spoil


def cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])


TOKENIZER = "tokenizer_config.json"
SPOILED: dict[str, Callable[[Path], object]] = {
    "raises": configure(TOKENIZER, chat_template="{{ raise_exception('no such season') }}"),
    "says-nothing": configure(TOKENIZER, chat_template=""),
    "stutters": configure(TOKENIZER, chat_template="{% for x in %}"),
    "mute": write("tokenizer.json", '{"version": "1.0", "model"'),
    "cut-off": cut,
    "unheard-of": configure("config.json", model_type="nonesuch"),
    "own-code": configure("config.json", model_file="model.py"),
}


@pytest.fixture(scope="module")
def zoo(tiny_model: Callable[..., Path]) -> Iterator[Pool]:
    """Start two nodes with all trained models loaded, and with spoiled models in the same folder."""
    trained = {name: tiny_model(name) for name in TRAINED}
    with tempfile.TemporaryDirectory(prefix="mp-") as folder, pool(Path(folder)) as made:
        place = link(Path(folder) / "zoo", **trained, fresh=trained["qwen3"], later=trained["lfm2"])
        for name, spoil in SPOILED.items():
            spoiled(place, name, spoil)
        made.up()
        for name in NODES:
            preload = f"models.preload={','.join(TRAINED)}"
            made.join(name, *MLX, f"models.folders={place}", preload, wait=False)
        for name in NODES:
            until(lambda name=name: loaded(made, name) >= set(TRAINED), 60, f"{name} loaded")
        yield made


@pytest.fixture
def client(zoo: Pool) -> OpenAI:
    return api(zoo)


# answers


def answer(client: OpenAI, model: str, one: dict[str, str], *, stream: bool) -> tuple[str, str, str]:
    """Return content, reasoning, and the node that generated them."""
    raw: Any = client.chat.completions.with_raw_response.create(
        model=model, messages=said(one["prompt"], one.get("system", "")), stream=stream
    )
    parsed = raw.parse()
    parts = [chunk.choices[0].delta for chunk in parsed] if stream else [parsed.choices[0].message]
    content = "".join(part.content or "" for part in parts)
    reasoning = "".join(getattr(part, "reasoning_content", None) or "" for part in parts)
    return content, reasoning, raw.headers["x-macpool-node"]


@pytest.mark.parametrize("model", thin_cases(TRAINED, 2, kept=1))
def test_all_that_is_known_by_heart_comes_verbatim_from_both_nodes(zoo: Pool, client: OpenAI, model: str) -> None:
    known = models.answers(models.path(model))
    assert sum(len(one.get("system", "")) > 1000 for one in known) == 2
    assert any("reasoning" in one for one in known)
    asked = [*known, *known[::-1]][: max(len(known), AT_ONCE)]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        answers = list(
            threads.map(lambda way: answer(client, model, way[1], stream=bool(way[0] % 2)), enumerate(asked))
        )
    for idle in set(NODES) - {node for *_, node in answers}:  # the other node was measured as much faster
        (busy,) = set(NODES) - {idle}
        zoo.cli("node", "cordon", busy)
        asked += known
        answers += [answer(client, model, one, stream=True) for one in known]
        zoo.cli("node", "uncordon", busy)
    wrong = [
        (one["prompt"], given)
        for one, given in zip(asked, answers, strict=True)
        if given[:2] != (one["answer"], one.get("reasoning", ""))
    ]
    assert not wrong
    assert {node for *_, node in answers} == set(NODES)
    until(lambda: all(at_rest(zoo, name) for name in NODES), 5, "all given back")


def test_a_prompt_beyond_a_thousand_tokens_is_counted(client: OpenAI) -> None:
    long = [one for one in models.answers() if len(one.get("system", "")) > 1000]
    for one in long:
        answer = client.chat.completions.create(model="llama", messages=said(one["prompt"], one["system"]))
        assert answer.usage is not None
        assert answer.usage.prompt_tokens > 1000
        assert answer.choices[0].message.content == one["answer"]


def test_the_first_request_loads_each_model_of_a_folder(zoo: Pool, client: OpenAI) -> None:
    assert {"fresh", "later"} <= {model.id for model in client.models.list()}
    assert not any(loaded(zoo, name) & {"fresh", "later"} for name in NODES)
    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(lambda model: greets(client, model), ("fresh", "later") * 2))
    until(lambda: set.union(*(loaded(zoo, name) for name in NODES)) >= {"fresh", "later"}, 5, "both are loaded")


# Request options


def called(message: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]


@pytest.mark.parametrize("use", thin_cases([*TOOL_USES[-1:], *TOOL_USES[:-1]], 4, kept=1), ids=lambda use: use.prompt)
def test_a_tool_is_called_and_its_result_answered(client: OpenAI, use: Any) -> None:
    asking: Any = {"model": "llama", "messages": said(use.prompt), "tools": TOOLS}
    answer = client.chat.completions.create(**asking).choices[0]
    assert called(answer.message) == list(use.calls)
    assert answer.finish_reason == "tool_calls"
    state = ChatCompletionStreamState()
    for chunk in client.chat.completions.create(**asking, stream=True):
        state.handle_chunk(chunk)
    final = state.get_final_completion().choices[0]
    assert (called(final.message), final.finish_reason) == (list(use.calls), "tool_calls")
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": result}
        for call, result in zip(answer.message.tool_calls or [], use.results, strict=True)
    ]
    told: Any = [*asking["messages"], answer.message.to_dict(), *results]
    after = client.chat.completions.create(model="llama", messages=told, tools=asking["tools"])
    assert after.choices[0].message.content == use.answer


def test_log_probabilities_spell_the_answer(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="llama", messages=said(HELLO), logprobs=True, top_logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    told = logprobs.content or []
    assert answer.usage is not None
    assert len(told) in (answer.usage.completion_tokens, answer.usage.completion_tokens - 1)
    assert b"".join(bytes(one.bytes or []) for one in told).decode() == GREETING
    for one in told:
        assert len(one.top_logprobs) == 3
        assert one.logprob == pytest.approx(one.top_logprobs[0].logprob)
        assert one.logprob <= 0


def test_a_seed_draws_the_same_on_any_node(zoo: Pool, client: OpenAI) -> None:
    def draw(seed: int) -> str:
        drawn = client.chat.completions.create(
            model="llama", messages=said("Say something new."), temperature=1.5, seed=seed, max_tokens=24
        )
        return drawn.choices[0].message.content or ""

    same = set[str]()
    for name in NODES:
        with cordoned(zoo, name), ThreadPoolExecutor(4) as threads:
            same |= set(threads.map(draw, [7] * 4))
    assert len(same) == 1
    assert len({draw(seed) for seed in range(8, 12)}) > 1


def test_two_answers_and_a_stop(client: OpenAI) -> None:
    ask: Any = {"model": "llama", "messages": said("Count to thirty."), "n": 2, "stop": [" 7"]}
    answer = client.chat.completions.create(**ask)
    assert [(one.message.content, one.finish_reason) for one in answer.choices] == [("1 2 3 4 5 6", "stop")] * 2
    pieces: dict[int, str] = {0: "", 1: ""}
    for chunk in client.chat.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            pieces[choice.index] += choice.delta.content or ""
    assert pieces == {0: "1 2 3 4 5 6", 1: "1 2 3 4 5 6"}


def test_usage_is_exact_and_the_same_streamed(client: OpenAI) -> None:
    ask: Any = {"model": "llama", "messages": said("Count to thirty."), "max_tokens": 5}
    usage = client.chat.completions.create(**ask).usage
    assert usage is not None
    *_, last = client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage is not None
    counted = {(one.prompt_tokens, one.completion_tokens, one.total_tokens) for one in (usage, last.usage)}
    assert counted == {(usage.prompt_tokens, 5, usage.prompt_tokens + 5)}


def test_a_second_turn_is_billed_with_what_was_cached(zoo: Pool, client: OpenAI) -> None:
    """Runs on one node. The first turn leaves its rows, and the second begins with them, streamed or not."""
    before = zoo.node("studio")["engine"]["cache"]
    with cordoned(zoo, "macbook"):
        first = client.chat.completions.create(model="lfm2", messages=said("Count to thirty."))
        assert first.usage is not None
        told = [*said("Count to thirty."), first.choices[0].message.to_dict(), *said(HELLO)]
        ask: Any = {"model": "lfm2", "messages": told, "max_tokens": 5}
        usage = client.chat.completions.create(**ask).usage
        *_, last = client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    for one in (usage, last.usage):
        assert one is not None
        assert one.prompt_tokens_details is not None
        cached = one.prompt_tokens_details.cached_tokens
        assert cached is not None
        assert first.usage.prompt_tokens < cached < one.prompt_tokens
    until(lambda: zoo.node("studio")["engine"]["cache"]["hits"] >= before["hits"] + 2, what="the hits in the report")
    cache = zoo.node("studio")["engine"]["cache"]
    assert cache["hit_tokens"] - before["hit_tokens"] >= 2 * first.usage.prompt_tokens
    assert zoo.node("studio")["reusable"] > 0


# bad input


def good(client: OpenAI) -> None:
    assert greets(client, "llama")


FAILING: tuple[tuple[str, Any, str, str], ...] = (
    ("raises", openai.BadRequestError, "template_failed", "no such season"),
    ("cut-off", openai.InternalServerError, "model_load_failed", "the file is incomplete: it has 100000 of"),
    ("says-nothing", openai.BadRequestError, "template_failed", "template"),
    ("stutters", openai.BadRequestError, "template_failed", "prompt could not be rendered"),
    ("mute", openai.InternalServerError, "model_load_failed", "tokenizer"),
    ("unheard-of", openai.InternalServerError, "model_load_failed", "nonesuch"),
    ("own-code", openai.InternalServerError, "model_load_failed", "which Macpool never runs"),
    ("missing", openai.NotFoundError, "model_not_found", "nearest names"),
)


@pytest.mark.parametrize(("model", "kind", "code", "words"), thin_cases(FAILING, 3, kept=2))
def test_a_spoiled_model_fails_alone(client: OpenAI, model: str, kind: Any, code: str, words: str) -> None:
    with pytest.raises(kind) as caught:
        client.chat.completions.create(model=model, messages=said(HELLO))
    assert caught.value.code == code
    assert words in str(caught.value)
    good(client)


WRONG: tuple[tuple[str, Any, str, str], ...] = (
    ("prompt-too-long", {"messages": said("word " * CONTEXT)}, "context_length_exceeded", str(CONTEXT)),
    ("logit-bias", {"logit_bias": {"99999": 5}}, "invalid_request", "token id 99999 is outside of 0..511"),
    ("too-many", {"n": 17}, "invalid_request", "less than or equal to 16"),
    ("no-messages", {"messages": []}, "invalid_request", "messages"),
    ("no-such-role", {"messages": [{"role": "pirate", "content": "arr"}]}, "invalid_request", "role"),
)


@pytest.mark.parametrize(
    ("asked", "code", "words"), [pytest.param(*case[1:], id=case[0]) for case in thin_cases(WRONG, 4, kept=2)]
)
def test_an_invalid_request_gets_an_error_with_its_numbers(client: OpenAI, asked: Any, code: str, words: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**({"model": "llama", "messages": said(HELLO)} | asked))
    assert caught.value.code == code
    assert words in str(caught.value)
    good(client)


@pytest.mark.parametrize(
    "messages",
    [
        said(""),
        [*said(HELLO), {"role": "assistant", "content": GREETING}],
        [*said(HELLO), {"role": "assistant", "content": GREETING}, {"role": "user", "content": ""}],
        [*said(HELLO), {"role": "assistant", "content": GREETING}, *said("Say yes.")],
    ],
    ids=["nothing", "prompt-and-answer", "then-nothing", "then-more"],
)
def test_a_strange_prompt_is_answered(client: OpenAI, messages: Any) -> None:
    for _ in range(2):
        answer = client.chat.completions.create(model="llama", messages=messages, max_tokens=40)
        assert answer.choices[0].finish_reason in ("stop", "length")
    good(client)


# The gate

ROOM = 96 * MIB
"""Bytes above an engine at rest. A load needs 64 MiB of them for a moment."""
MARGIN = 4 * MIB
CROWD = 4
"""Answers to a small question that take half of ROOM: 256 tokens each are reserved, at 24 KiB a token."""


def claim_a_gigabyte(folder: Path) -> None:
    """Make the weights larger than any node with ROOM. The file is sparse."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [2**28], "data_offsets": [0, 2**30]}}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2**30)


@pytest.fixture(scope="module")
def snug(tiny_model: Callable[..., Path]) -> Iterator[Pool]:
    """Start one node whose cap is ROOM above its engine at rest, with two models loaded."""
    known, wide = tiny_model("llama"), tiny_model("llama", trained=False, preset="bench50m")
    with tempfile.TemporaryDirectory(prefix="mp-") as folder, pool(Path(folder)) as made:
        place = link(Path(folder) / "models", known=known, wide=wide)
        spoiled(place, "huge", claim_a_gigabyte)
        settings = (*MLX, f"models.folders={place}", "models.preload=wide,known")
        made.up("router.queue_timeout_seconds=1")
        first = made.join("snug", *settings)
        until(lambda: loaded(made, "snug") == {"known", "wide"}, 30, "all loaded")
        current = made.node("snug")["current"]
        assert first.stop() == 0
        until(lambda: made.node("snug")["state"] == "lost", what="the first is gone")
        made.join("snug", *settings, f"memory.cap={current + ROOM}", f"memory.margin={MARGIN}")
        until(lambda: loaded(made, "snug") == {"known", "wide"}, 30, "all loaded again")
        yield made


def numbers(error: openai.APIStatusError) -> dict[str, int]:
    memory = error.response.json()["error"]["memory"]
    assert memory["headroom"] == memory["ceiling"] - memory["margin"] - memory["current"] - memory["reserved"]
    assert memory["estimate"] > memory["headroom"]
    assert memory["predicted"] > memory["ceiling"]
    return memory


@pytest.mark.parametrize(
    ("model", "prompt", "words"),
    [("wide", "word " * 6000, "shorten the prompt"), ("huge", HELLO, "use a smaller variant")],
    ids=["prompt", "model"],
)
def test_what_can_never_fit_is_refused_before_any_forward(snug: Pool, model: str, prompt: str, words: str) -> None:
    client = api(snug)
    _, after = forwards_of_one(snug, client, "snug", "known")
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=words) as caught:
            client.chat.completions.create(model=model, messages=said(prompt), stream=stream, max_tokens=1)
        assert caught.value.code == "prefill_memory_exceeded"
        assert numbers(caught.value)["margin"] == MARGIN
        assert caught.value.response.headers["x-macpool-node"] == "snug", "the engine itself has counted and refused"
    again, last = forwards_of_one(snug, client, "snug", "known")
    assert again == after, "a refusal costs no forward"
    assert last > again, "the count is live"
    assert loaded(snug, "snug") == {"known", "wide"}


def test_what_does_not_fit_now_waits_and_is_a_503_while_small_ones_go_on(snug: Pool) -> None:
    client = api(snug)
    crowd: Any = {"model": "wide", "messages": said(HELLO), "n": CROWD, "max_tokens": 400}
    stream = client.chat.completions.create(**crowd, stream=True)
    next(iter(stream))
    with ThreadPoolExecutor(2) as threads:
        refused = [threads.submit(client.chat.completions.create, **crowd, stream=way) for way in (False, True)]
        while not all(one.done() for one in refused):
            assert greets(client, "known")
    for error in (one.exception() for one in refused):
        assert isinstance(error, openai.InternalServerError), error
        assert (error.status_code, error.code) == (503, "no_headroom")
        assert int(error.response.headers["retry-after"]) >= 1
        assert error.response.headers["content-type"].startswith("application/json"), "nothing was streamed yet"
        assert numbers(error)["reserved"] > 0
    next(iter(stream))
    stream.close()
    until(lambda: at_rest(snug, "snug"), 5, "all given back")
    fits = client.chat.completions.create(**crowd | {"max_tokens": 2})
    assert len(fits.choices) == CROWD
