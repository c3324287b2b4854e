"""The behaviour of mlx-lm's GenerationBatch (pinned) on which its adapter relies."""

import gc
import weakref
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from node.engine.grammar.logits_mask import LogitsMask
from node.engine.kv.disk.block_file import BlockPart
from node.engine.kv.disk.layer_parts import begin_cut
from node.engine.kv.kv_cache import LayerCache, TextModel, is_plain, measure_kv_parameters, sum_nbytes
from node.engine.scheduling.decode_batch import EVALUATION_INTERVAL_STEPS, DecodeBatch, JoiningRow, RowSampler
from node.engine.scheduling.sampling import choose_greedily
from tests import models
from tests.support.engine.text_engine import decoded_alone, prefilled
from wire.capacity.batches import compute_padded_bytes
from wire.report import BatchGroup

smollm3: Any = import_module("mlx_lm.models.smollm3")
ARCHITECTURES = (
    "llama",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("qwen3", "qwen3_moe", "gemma3_text", "lfm2", "qwen3_next")
    ),
)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> TextModel:
    return load_model(tiny_model(request.param, trained=request.param in ("llama", "qwen3", "lfm2")))[0]


@pytest.fixture(scope="module")
def llama() -> TextModel:
    return load_model(models.path("llama"))[0]


def join(batch: DecodeBatch[str], model: TextModel, name: str, ids: list[int]) -> list[int]:
    """Add a row and return its first token."""
    return [
        one.token
        for one in batch.join([JoiningRow(name, RowSampler(choose_greedily, ()))], ids, *prefilled(model, ids))
    ]


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 31 + place * 7) % 400 + 20 for place in range(length)]


class Watched:
    """Model that keeps the caches of its last forward."""

    def __init__(self, model: TextModel):
        self.model = model
        self.caches: Sequence[LayerCache] = ()

    def __call__(self, tokens: mx.array, cache: Sequence[LayerCache]) -> mx.array:
        self.caches = cache
        return self.model(tokens, cache=cache)

    def count_unevaluated(self, file: Path) -> int:
        """Return the number of edges of the largest graph of operations that an array of the caches still needs."""
        export: Callable[..., None] = vars(mx)["export_to_dot"]
        most = 0
        for layer in self.caches:
            for array in cast("tuple[object, ...]", layer.state):
                if isinstance(array, mx.array):
                    export(str(file), array)
                    most = max(most, file.read_text().count("->"))
        return most


def test_layers_without_rotary_embedding_keep_no_buffer_for_each_step(tmp_path: Path):
    shape = {"hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": 64, "num_attention_heads": 2}
    arguments = smollm3.ModelArgs.from_dict(
        {
            **shape,
            "model_type": "smollm3",
            "num_key_value_heads": 1,
            "rms_norm_eps": 1e-5,
            "vocab_size": 64,
            "rope_theta": 1e4,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 2,
        }
    )
    model = cast("TextModel", smollm3.Model(arguments))
    watched = Watched(model)
    batch: DecodeBatch[str] = DecodeBatch(watched)
    join(batch, model, "a", [1, 2, 3])
    counts = list[int]()
    for _ in range(3 * EVALUATION_INTERVAL_STEPS):
        batch.step()
        counts.append(watched.count_unevaluated(tmp_path / "graph"))
    assert max(counts[:EVALUATION_INTERVAL_STEPS]) > EVALUATION_INTERVAL_STEPS, "a forward does not read their offsets"
    assert max(counts) <= max(counts[:EVALUATION_INTERVAL_STEPS]) + 8


def test_the_version_is_the_one_that_was_read():
    assert version("mlx-lm") == "0.32.2"


def test_rows_that_come_and_go_decode_as_if_alone(model: TextModel):
    prompts = {"a": prompt(1, 40), "b": prompt(2, 90), "c": prompt(3, 7), "d": prompt(4, 60)}
    wanted = {name: decoded_alone(model, ids, 24) for name, ids in prompts.items()}
    got: dict[str, list[int]] = {name: [] for name in prompts}
    batch: DecodeBatch[str] = DecodeBatch(model)
    joins, drops = {0: "a", 3: "b", 5: "c", 12: "d"}, {10: "b", 20: "a"}
    for step in range(24):
        if step in joins:
            got[joins[step]] += join(batch, model, joins[step], prompts[joins[step]])
        if step in drops:
            batch.drop_rows([drops[step]])
        for token in batch.step():
            got[token.row].append(token.token)
    for name, tokens in got.items():
        assert len(tokens) >= 6
        assert tokens == wanted[name][: len(tokens)], name
    assert sorted(batch.list_rows()) == ["c", "d"]


def test_the_probabilities_of_a_model_with_16_bits_add_up_to_one():
    model = load_model(models.path("llama"))[0]
    model.set_dtype(mx.bfloat16)
    ids, batch = prompt(6, 20), DecodeBatch[str](model)
    tokens = batch.join([JoiningRow("a", RowSampler(choose_greedily, ()))], ids, *prefilled(model, ids))
    for token in (*tokens, *(token for _ in range(3) for token in batch.step())):
        assert mx.exp(token.logprobs.astype(mx.float32)).sum().item() == pytest.approx(1, abs=1e-4)


def test_a_batch_is_freed_without_a_collection_of_garbage(llama: TextModel):
    batch = DecodeBatch[str](llama)
    join(batch, llama, "a", prompt(7, 20))
    batch.step()
    left = weakref.ref(batch)
    gc.disable()
    try:
        del batch
        assert left() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("end", [lambda batch: batch.drop_rows(["a"]), DecodeBatch[str].clear], ids=["drop", "clear"])
def test_a_launched_step_ends_before_its_arrays_are_freed(
    llama: TextModel, monkeypatch: pytest.MonkeyPatch, end: Callable[[DecodeBatch[str]], None]
):
    watched = Watched(llama)
    batch = DecodeBatch[str](watched)
    join(batch, llama, "a", prompt(7, 20))
    batch.step()
    layer, waited = weakref.ref(watched.caches[0]), list[bool]()
    watched.caches = ()
    synchronize = mx.synchronize

    def wait() -> None:
        waited.append(layer() is not None)
        synchronize()

    monkeypatch.setattr(mx, "synchronize", wait)
    end(batch)
    assert waited == [True]
    assert layer() is None


def test_equal_rows_share_one_prefill(model: TextModel):
    ids = prompt(5, 50)
    batch: DecodeBatch[str] = DecodeBatch(model)
    first = batch.join(
        [JoiningRow(name, RowSampler(choose_greedily, ())) for name in "xyz"], ids, *prefilled(model, ids)
    )
    rows: dict[str, list[int]] = {token.row: [token.token] for token in first}
    for _ in range(8):
        for token in batch.step():
            rows[token.row].append(token.token)
    assert rows["x"] == rows["y"] == rows["z"] == decoded_alone(model, ids, 8)


def test_for_the_last_tokens_no_step_is_launched_and_none_is_given_twice(model: TextModel):
    prompts = {"a": prompt(1, 40), "b": prompt(2, 90)}
    batch: DecodeBatch[str] = DecodeBatch(model)
    got = {name: join(batch, model, name, ids) for name, ids in prompts.items()}
    for on in (False, True, True, False, True, True):
        for token in batch.step() if on else batch.take_last_tokens():
            got[token.row].append(token.token)
    for name, ids in prompts.items():
        assert got[name] == decoded_alone(model, ids, len(got[name])), name
        assert len(got[name]) == 5, "the first token and one of a step not launched are returned once"


def test_a_prompt_of_one_token_is_a_prompt(model: TextModel):
    batch: DecodeBatch[str] = DecodeBatch(model)
    first = join(batch, model, "one", [25])
    assert [*first, *(token.token for _ in range(4) for token in batch.step())] == decoded_alone(model, [25], 4)


def test_measured_kv_parameters_cover_the_bytes_of_a_row(model: TextModel):
    kv = measure_kv_parameters(prefilled(model, prompt(1, 9))[0])
    for length in (300, 500):
        cache, _ = prefilled(model, prompt(1, length))
        assert sum_nbytes(cache) <= compute_padded_bytes(BatchGroup(1, length, length), kv)
        assert sum_nbytes(cache) >= 0.5 * compute_padded_bytes(BatchGroup(1, length, length), kv)


def test_a_long_row_with_seven_short_ones_takes_the_predicted_bytes(llama: TextModel):
    kv = measure_kv_parameters(prefilled(llama, prompt(1, 9))[0])
    batch: DecodeBatch[str] = DecodeBatch(llama)
    join(batch, llama, "long", prompt(0, 1500))
    for number in range(7):
        join(batch, llama, str(number), prompt(number, 40))
    batch.step()
    said = compute_padded_bytes(BatchGroup(8, 1502), kv)
    assert batch.sum_nbytes() == pytest.approx(said, rel=0.02)
    assert batch.sum_nbytes() > 7 * compute_padded_bytes(BatchGroup(1, 1500), kv), (
        "padding is real: eight times the long row"
    )
    batch.drop_rows(["long"])
    assert batch.sum_nbytes() < compute_padded_bytes(BatchGroup(8, 600), kv), (
        "the padding goes with the row that caused it"
    )


def test_joining_and_leaving_free_what_they_replace(llama: TextModel):
    batch: DecodeBatch[str] = DecodeBatch(llama)
    for number in range(4):
        join(batch, llama, str(number), prompt(number, 600))
    batch.step()
    mx.clear_cache()
    held = mx.get_active_memory() - batch.sum_nbytes()
    batch.drop_rows(["0", "1", "2"])
    mx.clear_cache()
    assert mx.get_active_memory() - batch.sum_nbytes() <= held + 2**20, "nothing pins the old batch"


def test_the_peak_of_a_join_is_about_one_layer_not_one_batch(llama: TextModel):
    batch: DecodeBatch[str] = DecodeBatch(llama)
    for number in range(6):
        join(batch, llama, str(number), prompt(number, 900))
    cache, logits = prefilled(llama, prompt(9, 900))
    batch.step()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    batch.join([JoiningRow("new", RowSampler(choose_greedily, ()))], prompt(9, 900), cache, logits)
    batch.step()
    rose = mx.get_peak_memory() - before
    assert rose < 0.7 * batch.sum_nbytes(), "evaluated whole, the old and the new batch stand side by side"


def test_a_batch_for_one_row_takes_no_other(llama: TextModel):
    batch: DecodeBatch[str] = DecodeBatch(llama, alone=True)
    ids = prompt(1, 30)
    got = join(batch, llama, "a", ids)
    with pytest.raises(ValueError, match="takes no other row"):
        join(batch, llama, "b", prompt(2, 30))
    other: DecodeBatch[str] = DecodeBatch(llama, alone=True)
    both = [JoiningRow(name, RowSampler(choose_greedily, ())) for name in ("a", "b")]
    with pytest.raises(ValueError, match="takes no other row"):
        other.join(both, ids, *prefilled(llama, ids))
    got += [token.token for _ in range(6) for token in batch.step()]
    assert got == decoded_alone(llama, ids, 6)
    copied, held = batch.extract("a"), batch.get_ids("a")
    batch.step()
    wanted = prefilled(llama, held)[0]
    for mine, fresh in zip(cast("Any", copied), cast("Any", wanted), strict=True):
        assert mine.keys.shape[2] == mine.offset == len(held), "the copy has no unused room, and later steps miss it"
        assert mx.allclose(mine.keys, fresh.keys[..., : len(held), :], atol=1e-4)
    assert batch.view("a") is None
    batch.drop_rows(["a"])
    assert (len(batch), batch.sum_nbytes()) == (0, 0)


def boom(*_: mx.array) -> mx.array:
    raise RuntimeError("boom")


def test_what_a_sampler_or_processor_raises_stays_with_its_row(llama: TextModel):
    ids = prompt(1, 30)
    batch: DecodeBatch[str] = DecodeBatch(llama)
    good = join(batch, llama, "good", ids)
    batch.join([JoiningRow("sampler", RowSampler(boom, ()))], ids, *prefilled(llama, ids))
    batch.join([JoiningRow("processor", RowSampler(choose_greedily, (boom,)))], ids, *prefilled(llama, ids))
    good += [token.token for _ in range(6) for token in batch.step() if token.row == "good"]
    assert good == decoded_alone(llama, ids, 6)
    assert sorted(row for row, error in batch.list_errors() if str(error) == "boom") == ["processor", "sampler"]


def test_all_processors_of_a_row_run_before_its_mask():
    def add(value: float) -> Callable[[mx.array, mx.array], mx.array]:
        return lambda tokens, logits: mx.concatenate([logits, mx.array([value])])

    guard = RowSampler(choose_greedily, (add(1.0), add(2.0)), cast("LogitsMask", add(3.0)))
    logits = mx.array([0.0])
    for processor in guard.processors:
        logits = processor(mx.array([5]), logits)
    assert logits.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_wait_is_for_the_tokens_of_the_launched_step(llama: TextModel, monkeypatch: pytest.MonkeyPatch):
    batch, awaited = DecodeBatch[str](llama), list[mx.array]()
    join(batch, llama, "a", prompt(7, 20))
    batch.step()
    monkeypatch.setattr("node.engine.scheduling.decode_batch.evaluate", awaited.append)
    batch.wait()
    (tokens,) = awaited
    assert [token.token for token in batch.take_last_tokens()] == tokens.tolist()


def test_greedy_rows_share_one_sampler():
    assert RowSampler(choose_greedily, ()).sampler is RowSampler(choose_greedily, ()).sampler is choose_greedily


def test_an_empty_batch_gives_nothing():
    batch: DecodeBatch[str] = DecodeBatch(boom)  # type: ignore[arg-type]
    batch.wait()
    assert batch.step() == batch.take_last_tokens() == batch.list_errors() == []
    assert batch.sum_nbytes() == 0
    batch.drop_rows(["unknown"])


def test_a_view_of_a_row_has_its_tokens_without_padding(model: TextModel):
    prompts = {"a": prompt(1, 40), "b": prompt(2, 90)}
    batch: DecodeBatch[str] = DecodeBatch(model)
    for name, ids in prompts.items():
        join(batch, model, name, ids)
    view, copied = batch.view("a"), batch.extract("a")
    assert batch.view("c") is None
    plain = is_plain(prefilled(model, [25])[0])
    assert (view is not None) == plain, "windows and states have no positions of tokens"
    for mine, wanted in zip(cast("Any", view or []), cast("Any", copied), strict=plain):
        assert mx.array_equal(mine.keys[..., :40, :], wanted.keys[..., :40, :])
        assert mx.array_equal(mine.values[..., :40, :], wanted.values[..., :40, :])


def test_a_part_of_a_row_is_cut_out_without_a_copy_of_the_batch(llama: TextModel):
    batch: DecodeBatch[str] = DecodeBatch(llama)
    names = ("a", "b", "c", "d")
    for seed, name in enumerate(names):
        join(batch, llama, name, prompt(seed, 800))
    batch.step()

    def measure_peak(*, cut: bool) -> int:
        """Return the highest memory of three steps, above that before them."""
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        for start in (0, 256, 512):
            part = begin_cut(batch.view(names[0]) or [], BlockPart.TOKENS, start, start + 256) if cut else None
            assert (part is not None) == cut
            if part is not None:
                part.collect()
            batch.step()
            del part
        return mx.get_peak_memory() - before

    plain, part = measure_peak(cut=False), batch.sum_nbytes() // 4 // 4
    assert measure_peak(cut=True) <= plain + 2 * part
