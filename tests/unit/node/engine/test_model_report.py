from pathlib import PurePath

from node.engine.model_report import LoadFacts, ModelFacts, compute_transients, describe_unloaded
from node.engine.models.model_descriptor import ModelDescriptor
from wire.capacity.arithmetic import estimate_prefill_transient
from wire.report import KvParameters, TransientModel

FORWARD = TransientModel(fixed=1e6, token=1e3)
FOUND = ModelDescriptor(
    "m", PurePath("m"), "f1", 90, 1000, KvParameters(7, 256, 3, 64, 2), forward=FORWARD, written=1e9
)


def test_transients_are_those_of_the_smallest_chunk():
    found = compute_transients(FORWARD, 64)
    assert found["forward"].floor == 64
    assert found["transient"] == estimate_prefill_transient(FORWARD, 64, 0)


def test_a_model_that_is_not_loaded_is_described_by_its_files_and_its_load():
    load = LoadFacts(weights=100, expected_seconds=5.0, waste=9, loading=True, progress=0.5, cause="why")
    model = describe_unloaded(FOUND, ModelFacts(500, ("tools",), pinned=True, floor=64), load)
    assert (model.name, model.fingerprint, model.loaded, model.weights, model.context) == ("m", "f1", False, 100, 500)
    assert (model.kv_per_token, model.kv_step, model.kv_fixed, model.kv_waste) == (7, 256, 3, 9)
    assert (model.kv_window, model.kv_window_per_token) == (64, 2)
    assert (model.loading, model.progress, model.cause, model.load_seconds) == (True, 0.5, "why", 5.0)
    assert (model.pinned, model.features, model.forward.floor) == (True, ("tools",), 64)
    assert (model.written, model.used) == (1e9, 0.0)
