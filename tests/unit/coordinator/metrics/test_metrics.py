"""The metrics for Prometheus: every family, of honest and lying nodes, in both formats, with a bounded number of
series."""

import math
import shutil
import subprocess
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from coordinator.metrics.exposition import MAX_LABEL_CHARS, render_metrics
from coordinator.metrics.families import MAX_MODELS_PER_NODE, MetricKind, collect_families
from coordinator.metrics.labels import AdmittedLabels
from coordinator.metrics.metrics_source import decode_measures
from coordinator.metrics.node_families import NODE
from coordinator.metrics.node_snapshot import NodeSnapshot, sanitize_measures, sort_by_priority
from coordinator.metrics.pool_families import POOL
from coordinator.metrics.pool_snapshot import PoolSnapshot
from coordinator.models.wish_counters import WishSnapshot
from router.dispatch.counters import MAX_KEY_MODELS, Counters
from router.dispatch.counters import MAX_MODELS as MOST_MODELS_OF_A_POOL
from router.placement.cluster_view import ClusterView
from tests.support.cluster.loopback_cluster import a_model
from tests.support.pictures import HUGE, MEASURES, lying, node_picture, pool_picture, view
from wire.histogram import GateMeasures, HistogramSnapshot, NodeMeasures
from wire.identity import NodeId

OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(picture: NodeSnapshot | PoolSnapshot, accept: str = "") -> str:
    families: Any = NODE if isinstance(picture, NodeSnapshot) else POOL
    return render_metrics(collect_families(families, picture), accept)[0].decode()


def samples(text: str) -> Samples:
    read = read_openmetrics if text.endswith("# EOF\n") else read_text
    found = [sample for family in read(text) for sample in family.samples]
    named = {(one.name, tuple(sorted(one.labels.items()))): one.value for one in found}
    assert len(named) == len(found), "a series is listed twice"
    return named


PICTURES = [pytest.param(pool_picture(), id="pool"), pytest.param(node_picture(view(models=2)), id="node")]


@pytest.mark.parametrize("picture", PICTURES)
def test_prometheus_and_openmetrics_formats_have_equal_values(picture: Any):
    text, kind = render_metrics(collect_families(NODE if isinstance(picture, NodeSnapshot) else POOL, picture), "")
    assert kind.startswith("text/plain")
    newer, kind = render_metrics(
        collect_families(NODE if isinstance(picture, NodeSnapshot) else POOL, picture), OPENMETRICS
    )
    assert kind.startswith("application/openmetrics-text")
    assert samples(text.decode()) == samples(newer.decode())
    assert b"_created" not in newer


@pytest.mark.parametrize("version", ["abc", "1.x", "-", "1..0", "\u00b2"])
@pytest.mark.parametrize("media", ["application/openmetrics-text", "text/plain"])
def test_a_version_that_is_no_number_has_the_plain_format(media: str, version: str):
    text, kind = render_metrics(collect_families(POOL, pool_picture()), f"{media};version={version}")
    assert kind.startswith("text/plain")
    assert samples(text.decode())


@pytest.mark.parametrize("picture", PICTURES)
def test_every_family_has_series_where_everything_has_happened(picture: Any):
    families: Any = NODE if isinstance(picture, NodeSnapshot) else POOL
    rare = {
        "macpool_model_load_progress_ratio",
        "macpool_cluster_node_paused_until_timestamp_seconds",
        "macpool_router_model_swaps_total",
        "macpool_cluster_model_fingerprints",
    }
    assert {one.family.full_name for one in collect_families(families, picture) if not one.rows} <= rare


def test_metric_names_have_units_and_are_unique():
    names = [family.full_name for family in (*POOL, *NODE)]
    assert len(names) == len(set(names))
    for family in (*POOL, *NODE):
        assert family.meaning.endswith("."), family.name
        assert not family.name.endswith("_total")
        if family.kind is MetricKind.HISTOGRAM:
            assert family.name.endswith(("_seconds", "_bytes", "_ratio")), family.name
    assert not {label for family in NODE for label in family.label_names} & {"node", "instance", "job"}


@pytest.mark.parametrize("picture", PICTURES)
def test_the_official_linter_finds_nothing(picture: Any):
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed: Debian's package prometheus has it")
    done = subprocess.run(["promtool", "check", "metrics"], input=scrape(picture), capture_output=True, text=True)
    assert (done.returncode, done.stderr + done.stdout) == (0, "")


def test_the_sum_of_a_scrape_is_right():
    found = samples(scrape(node_picture(view())))
    value = {name.removeprefix("macpool_node_memory_"): one for (name, labels), one in found.items() if not labels}
    headroom = value["ceiling_bytes"] - value["margin_bytes"] - value["current_bytes"] - value["reserved_bytes"]
    assert value["headroom_bytes"] == headroom


# liars


def replaced(measures: NodeMeasures, **gate: Any) -> NodeMeasures:
    return msgspec.structs.replace(measures, gate=msgspec.structs.replace(measures.gate, **gate))


ANY = st.one_of(st.integers(-HUGE, HUGE), st.floats(), st.text(max_size=20), st.none(), st.booleans())


def test_metrics_of_a_malicious_node_are_finite_and_escaped():
    told = NodeMeasures(
        GateMeasures((("x\n", -5), ("prefill", 2**64)), (), HistogramSnapshot((1, -2), math.nan)), math.inf, -1
    )
    text = scrape(node_picture(view(report=lying()), sanitize_measures(told)))
    for (name, _), value in samples(text).items():
        assert math.isfinite(value), name
        assert value >= 0 or name == "macpool_node_memory_headroom_bytes", name
    assert "evil" not in text
    assert "\x1b" not in text


def test_a_hostile_name_is_escaped_and_makes_one_series():
    seen = replace(view(), name='evil"} 1\nmacpool_gate_armed{node="b\\')
    found = samples(scrape(replace(pool_picture(), view=type(pool_picture().view)((seen,)))))
    assert not any(name == "macpool_gate_armed" for name, _ in found)
    assert sum(name == "macpool_cluster_node_state" for name, _ in found) == 1


def test_a_long_name_is_cut_at_its_end():
    seen = replace(view(), name="a" * MAX_LABEL_CHARS + "b")
    found = samples(scrape(replace(pool_picture(), view=ClusterView((seen,)))))
    assert found["macpool_cluster_node_cordoned", (("node", "a" * MAX_LABEL_CHARS),)] == 0


def test_measures_with_a_text_that_is_not_utf8_are_invalid():
    valid = msgspec.msgpack.encode(NodeMeasures(GateMeasures((("join", 1),))))
    assert decode_measures(valid) is not None
    assert decode_measures(valid.replace(b"join", b"joi\xff")) is None


@given(st.recursive(ANY, lambda inner: st.lists(inner, max_size=5), max_leaves=30))
def test_scrape_succeeds_with_any_decoded_answer_of_a_node(answer: Any):
    measures = decode_measures(msgspec.msgpack.encode(answer))
    found = samples(scrape(node_picture(view(), measures)))
    assert all(math.isfinite(value) for value in found.values())


@given(st.binary(max_size=200))
def test_scrape_succeeds_with_any_bytes_of_a_node(answer: bytes):
    assert samples(scrape(node_picture(view(), decode_measures(answer))))


@given(st.lists(st.integers(-HUGE, 2**64 - 1), max_size=15), st.floats())
def test_histograms_of_false_reports_are_consistent_or_empty(counts: list[int], total: float):
    honest = sanitize_measures(NodeMeasures(GateMeasures(predicted=HistogramSnapshot(tuple(counts), total))))
    found = samples(scrape(node_picture(view(), honest)))
    rows = [value for (name, _), value in found.items() if name == "macpool_gate_predicted_peak_ratio_bucket"]
    assert rows == sorted(rows)
    assert rows[-1] == found["macpool_gate_predicted_peak_ratio_count", ()]


MOST = 2**53
EMPTY = NodeMeasures(GateMeasures(predicted=HistogramSnapshot((0,) * 11), transient=HistogramSnapshot((0,) * 11)))
COUNTS = tuple(range(11))


@pytest.mark.parametrize(
    ("told", "honest"),
    [
        (
            NodeMeasures(GateMeasures(predicted=HistogramSnapshot(COUNTS, 0.5))),
            replaced(EMPTY, predicted=HistogramSnapshot(COUNTS, 0.5)),
        ),
        (
            NodeMeasures(GateMeasures(predicted=HistogramSnapshot(COUNTS, 0.0))),
            replaced(EMPTY, predicted=HistogramSnapshot(COUNTS, 0.0)),
        ),
        (NodeMeasures(GateMeasures(predicted=HistogramSnapshot(COUNTS, -0.5))), EMPTY),
        (NodeMeasures(GateMeasures(predicted=HistogramSnapshot(COUNTS, math.inf))), EMPTY),
        (NodeMeasures(GateMeasures(predicted=HistogramSnapshot(COUNTS[1:], 0.5))), EMPTY),
        (NodeMeasures(GateMeasures(transient=HistogramSnapshot((*COUNTS, 11), 0.5))), EMPTY),
        (
            NodeMeasures(GateMeasures(transient=HistogramSnapshot((-1, MOST + 1, 2**60, *range(8)), 1.0))),
            replaced(EMPTY, transient=HistogramSnapshot((0, MOST, MOST, *range(8)), 1.0)),
        ),
        (
            NodeMeasures(GateMeasures((("join", -1), ("new", 2**60)), (("x", -2), ("y", 3)))),
            replaced(EMPTY, checks=(("join", 0), ("new", MOST)), refusals=(("x", 0), ("y", 3))),
        ),
        (
            NodeMeasures(GateMeasures((("join", 1),) * 65, (("x", 1),) * 65)),
            replaced(EMPTY, checks=(("join", 1),) * 64, refusals=(("x", 1),) * 64),
        ),
        *(
            (NodeMeasures(agent_cpu=cpu, agent_phys=phys), msgspec.structs.replace(EMPTY, agent_cpu=a, agent_phys=b))
            for cpu, phys, a, b in (
                (0.5, 1, 0.5, 1),
                (-0.5, -1, 0.0, 0),
                (math.inf, 2**60, 0.0, MOST),
                (math.nan, 0, 0.0, 0),
                (MOST - 1.0, MOST, MOST - 1.0, MOST),
                (float(MOST), 0, 0.0, 0),
            )
        ),
    ],
)
def test_sanitize_measures_keeps_plausible_values(told: NodeMeasures, honest: NodeMeasures):
    assert sanitize_measures(told) == honest


def test_gate_checks_at_sites_that_are_unknown_are_added_up():
    told = NodeMeasures(GateMeasures((("join", 1), ("new", 2), ("newer", 3), ("join", 4))))
    found = samples(scrape(node_picture(view(), sanitize_measures(told))))
    assert [found["macpool_gate_checks_total", (("site", site),)] for site in ("join", "other", "grow")] == [5, 5, 0]


def test_sort_by_priority_puts_loaded_models_first_then_by_name():
    models = (
        a_model("z", loaded=True),
        a_model("b", loaded=False),
        a_model("y", loaded=False, loading=True),
        a_model("a", loaded=False),
        a_model("c", loaded=True),
    )
    assert [model.name for model in sort_by_priority(view(report=lying(models)))] == ["c", "y", "z", "a", "b"]


def test_a_number_that_is_not_finite_costs_its_own_series_alone():
    picture = replace(pool_picture(), oldest_wait_seconds=math.inf, keys_refused=7)
    found = samples(scrape(picture))
    assert ("macpool_router_queue_oldest_seconds", ()) not in found
    assert found["macpool_auth_failures_total", ()] == 7


def test_full_names_are_those_of_a_scrape():
    names = {
        family.kind: family.full_name for family in POOL if family.name in ("cluster_links", "cluster_node_connections")
    }
    assert names == {
        MetricKind.GAUGE: "macpool_cluster_links",
        MetricKind.COUNTER: "macpool_cluster_node_connections_total",
    }


def test_model_conflict_metric_counts_names_with_two_models():
    nodes = tuple(
        replace(view(name), models={"same": a_model("same"), "torn": a_model("torn", fingerprint=name)})
        for name in ("a", "b")
    )
    found = samples(scrape(replace(pool_picture(), view=ClusterView(nodes))))
    counts = {labels: value for (name, labels), value in found.items() if name == "macpool_cluster_model_fingerprints"}
    assert counts == {(("model", "torn"),): 2.0}


def test_model_conflicts_have_a_bounded_number_of_series():
    names = [f"m{number}" for number in range(MAX_MODELS_PER_NODE + 1)]
    nodes = tuple(
        replace(view(node), models={name: a_model(name, fingerprint=node) for name in names}) for node in ("a", "b")
    )
    found = samples(scrape(replace(pool_picture(), view=ClusterView(nodes))))
    conflicts = [name for name, _ in found if name == "macpool_cluster_model_fingerprints"]
    assert len(conflicts) == MAX_MODELS_PER_NODE


# cardinality


def test_a_pool_of_ten_with_ten_models_has_about_two_thousand_series():
    pool = len(samples(scrape(pool_picture(10, 10))))
    node = len(samples(scrape(node_picture(view(models=10)))))
    assert pool + 10 * node <= 2230, (pool, node)
    assert pool <= 940
    assert node <= 150


def test_changing_words_of_a_node_add_no_series():
    labels, seen = AdmittedLabels(), set[tuple[str, tuple[tuple[str, str], ...]]]()
    for number in range(200):
        models = tuple(a_model(f"m{number}-{one}") for one in range(40))
        one = view("a", report=lying(models))
        about = labels.admit_host(one.id, (f"chip {number}", f"system {number}", f"{number}"))
        picture = NodeSnapshot(one, 0, 0, about, labels.admit_models(one.id, sort_by_priority(one)), MEASURES)
        seen |= samples(scrape(picture)).keys()
    named = {dict(series)["model"] for _, series in seen if "model" in dict(series)}
    assert len(named) == MAX_MODELS_PER_NODE
    assert len(seen) < 300
    labels.retain_members([])
    assert labels.admit_models(NodeId("a"), [a_model("later")])


def test_models_and_codes_that_are_made_up_make_no_more_series():
    counters = Counters()
    for number in range(1000):
        counters.count_end(f"code {number}", f"model {number}", 1.0)
        counters.count_first_token(NodeId("a"), f"model {number}", 1, 1.0)
        counters.count_end("ok", "", 1.0)
    found = samples(scrape(pool_picture(counters=counters, wishes=WishSnapshot())))
    models = {dict(labels)["model"] for _, labels in found if "model" in dict(labels)}
    assert len(models) <= MOST_MODELS_OF_A_POOL + 1
    assert "other" in models
    outcomes = {dict(labels)["outcome"] for name, labels in found if name == "macpool_router_requests_total"}
    assert outcomes == {"failed", "ok"}
    assert sum(value for (name, _), value in found.items() if name == "macpool_router_requests_total") == 2000


def key_series(counters: Counters, keys: dict[str, str]) -> dict[tuple[tuple[str, str], ...], float]:
    found = samples(scrape(pool_picture(counters=counters, keys=keys)))
    return {labels: value for (name, labels), value in found.items() if name == "macpool_key_tokens_total"}


def test_tokens_of_keys_are_labelled_with_names_and_two_keys_of_one_name_are_one_series():
    counters = Counters()
    counters.get_model("tiny")
    for key, tokens in (("id1", 5), ("id2", 7), ("revoked", 100)):
        counters.add_key_tokens(key, "tiny", tokens)
    assert key_series(counters, {"id1": "app", "id2": "app"}) == {(("key", "app"), ("model", "tiny")): 12}
    counters.retain_keys({"id1"})
    assert counters.keys == {("id1", "tiny"): 5}


def test_keys_and_models_that_are_made_up_make_no_more_than_a_bounded_number_of_series():
    counters = Counters()
    for number in range(MAX_KEY_MODELS + 100):
        counters.add_key_tokens(f"id{number}", f"model {number}", 1)
    found = key_series(counters, {f"id{number}": f"key {number}" for number in range(MAX_KEY_MODELS + 100)})
    assert len(found) == MAX_KEY_MODELS
    assert {dict(labels)["model"] for labels in found} == {"other"}
