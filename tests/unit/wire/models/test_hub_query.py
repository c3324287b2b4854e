"""The prediction of a model that is not downloaded, as the memory arithmetic reads it."""

from wire.models.hub_query import ModelPrediction
from wire.report import KvParameters, Model, TransientModel


def test_a_prediction_is_the_model_of_a_report_with_loaded_weights():
    kv = KvParameters(per_token=11, step=12, fixed=13, window=14, window_per_token=15, waste=16)
    transient = TransientModel(fixed=17.0, token=18.0)
    predicted = ModelPrediction(weights=20, stored=21, context=22, kv=kv, transient=transient, quantization="4bit")
    model = predicted.to_model("tiny")
    assert model == Model(
        name="tiny",
        weights=20,
        kv_per_token=11,
        kv_step=12,
        kv_fixed=13,
        kv_window=14,
        kv_window_per_token=15,
        kv_waste=16,
        context=22,
        forward=transient,
    )
    assert model.kv == kv
