"""The routes for Prometheus: required key, content, and the answer for unknown nodes."""

import json

import pytest

from tests.bench import metrics
from tests.support.cluster.loopback_cluster import LoopbackNode
from tests.support.cluster.whole_pool import Served, served, status


def get(pool: Served, path: str, scope: str = "metrics", *lines: str) -> tuple[int, bytes, bytes]:
    key = [f"authorization: Bearer {pool.keys[scope]}"] if scope else []
    head = "\r\n".join([f"GET {path} HTTP/1.1", "host: 127.0.0.1", *key, *lines])
    (answer,) = pool.ask(f"{head}\r\n\r\n".encode())
    headers, _, body = answer.partition(b"\r\n\r\n")
    return status(answer), headers.lower(), body


@pytest.mark.parametrize("path", ["/metrics", "/prometheus/sd", "/prometheus/nodes/a"])
def test_a_scrape_needs_the_scrape_token(path: str):
    with served(LoopbackNode("a")) as pool:
        assert get(pool, path, "")[0] == 401
        assert get(pool, path, "infer")[0] == 403
        assert get(pool, path)[0] in (200, 404)
        assert get(pool, path, "admin")[0] in (200, 404)


def test_metrics_format_follows_the_accept_header():
    with served(LoopbackNode("a")) as pool:
        code, headers, text = get(pool, "/metrics")
        assert code == 200
        assert b"content-type: text/plain; version=0.0.4" in headers
        assert b'macpool_cluster_node_headroom_bytes{node="a"}' in text
        _, headers, text = get(pool, "/metrics", "metrics", "accept: application/openmetrics-text; version=1.0.0")
        assert b"content-type: application/openmetrics-text; version=1.0.0" in headers
        assert text.endswith(b"# EOF\n")


def test_a_pool_without_members_has_an_empty_list_of_targets():
    with served(LoopbackNode("a")) as pool:
        code, headers, body = get(pool, "/prometheus/sd")
        assert (code, json.loads(body)) == (200, [])
        assert b"content-type: application/json" in headers


def test_a_node_that_is_no_member_has_no_page():
    with served(LoopbackNode("a")) as pool:
        for name in ("nobody", "..%2f..%2fetc", "%22%7d"):
            assert get(pool, f"/prometheus/nodes/{name}")[0] == 404


def test_a_trailing_slash_is_no_redirect():
    with served(LoopbackNode("a")) as pool:
        assert get(pool, "/metrics/")[0] == 404


def test_ten_nodes_with_ten_models_have_at_most_two_thousand_series():
    with metrics.full_pool() as pool:
        coordinator = metrics.count_series(pool.ask(metrics.build_scrape(pool))[0])
    node = metrics.count_series(metrics.render_node())
    assert min(coordinator, node) > 100, "the metrics are not whole"
    assert coordinator + metrics.NODES * node <= metrics.MAX_SERIES
