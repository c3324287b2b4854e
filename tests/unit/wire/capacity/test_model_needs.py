from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from wire.capacity.arithmetic import estimate_request_need
from wire.capacity.model_needs import ModelNeeds
from wire.report import BatchGroup, Model, TransientModel
from wire.units import MIB

SMALL = st.integers(0, 3000)
BYTES = st.sampled_from((0, 1, 1000, 64 * 1024, 7 * MIB))
REAL = st.sampled_from((0.0, 0.5, 3.0, 12_345.6, 8e6))
GROUPS = st.builds(BatchGroup, st.integers(1, 40), SMALL, st.integers(0, 60_000))
FORWARDS = st.builds(
    TransientModel,
    fixed=REAL,
    token=REAL,
    pair=REAL,
    seen=REAL,
    least=REAL,
    logits=REAL,
    step_fixed=REAL,
    step_row=REAL,
    step_seen=REAL,
    window=st.sampled_from((0, 1, 512)),
    floor=st.sampled_from((0, 1, 64, 512)),
)
MODELS = st.builds(
    Model,
    st.just("m"),
    loaded=st.booleans(),
    weights=BYTES,
    kv_per_token=BYTES,
    transient=BYTES,
    groups=st.lists(GROUPS, max_size=4).map(tuple),
    kv_step=st.sampled_from((1, 256)),
    kv_fixed=BYTES,
    kv_window=st.sampled_from((0, 512)),
    kv_window_per_token=BYTES,
    forward=FORWARDS,
    kv_waste=BYTES,
    covered_rows=st.integers(0, 20),
    uncovered=BYTES,
)


@given(MODELS, st.lists(st.tuples(SMALL, SMALL, st.integers(1, 4)), min_size=1, max_size=8))
def test_estimate_equals_the_need_of_the_gate(model: Model, requests: list[tuple[int, int, int]]):
    needs, weights = ModelNeeds(model), 0 if model.loaded else model.weights
    for prompt, output, choices in requests:
        expected = estimate_request_need(model, prompt, output, choices)
        assert needs.estimate(prompt, output, choices) + weights == expected


def test_a_row_joins_from_the_length_at_which_its_padding_is_small_enough():
    batch = BatchGroup(rows=3, longest=1000, tokens=2500)
    model = Model("m", loaded=True, kv_per_token=10, groups=(batch,), kv_waste=0)
    needs = ModelNeeds(model)
    assert needs.estimate(0, 499, 1) == 10 * 499, "a batch of its own: 1,001 of 4,000 tokens would be padding"
    assert needs.estimate(0, 500, 1) == 10 * 1000, "a row of the batch"


def test_each_part_of_the_need_is_that_of_the_gate():
    """In drawn models the largest of many parts decides alone. Here each part decides in some models."""
    draw = Random(0)
    coefficients = ("fixed", "token", "pair", "seen", "least", "logits", "step_fixed", "step_row", "step_seen")
    groups = (
        (),
        (BatchGroup(3, 1000, 2500),),
        (BatchGroup(2, 600, 1200), BatchGroup(3, 1000, 2500)),
        (BatchGroup(3, 1000, 2500), BatchGroup(2, 600, 1200)),
    )
    for _ in range(6000):
        forward: dict[str, Any] = {draw.choice(coefficients): 1000.0}
        forward |= {"window": draw.choice((0, 512)), "floor": draw.choice((0, 1, 64, 512))}
        model = Model(
            "m",
            loaded=True,
            kv_per_token=draw.choice((0, 10)),
            kv_waste=draw.choice((0, 5, 4000)),
            transient=draw.choice((0, 0, 9 * MIB)),
            groups=draw.choice(groups),
            forward=TransientModel(**forward),
            covered_rows=draw.choice((0, 1, 2, 3, 4, 5)),
            uncovered=draw.choice((0, 7 * MIB)),
        )
        prompt, output = draw.choice((0, 10, 63, 300, 1500)), draw.choice((0, 1, 499, 500, 700, 1000, 1001))
        choices = draw.choice((1, 2, 5))
        expected = estimate_request_need(model, prompt, output, choices)
        assert ModelNeeds(model).estimate(prompt, output, choices) == expected, (model, prompt, output, choices)
