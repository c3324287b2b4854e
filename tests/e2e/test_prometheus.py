"""A real Prometheus scrapes a real pool, by service discovery and with the scrape token."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.metrics.scrape_config import render_configuration
from tests.support.processes import Pool, pool, until
from tests.support.prometheus import needs, prometheus, token_file

pytestmark = pytest.mark.slow


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Pool]:
    needs("prometheus")
    with pool(tmp_path) as one:
        one.up()
        yield one


def test_nodes_are_found_scraped_and_missed(made: Pool, tmp_path: Path):
    """`up` follows a node's loss and return, and its series have the name from service discovery."""
    for name in ("one", "two"):
        made.join(name, "node.report_idle_seconds=0.5")
    key = made.create_key("prometheus", "metrics")
    text = render_configuration(made.base, str(token_file(tmp_path, key)), rules="none.yml", interval_seconds=1)
    with prometheus(tmp_path / "prometheus", text.replace("refresh_interval: 15s", "refresh_interval: 1s")) as found:
        until(lambda: found.up() == {"macpool": "1", "one": "1", "two": "1"}, what="every target is up")
        armed = {one["metric"]["node"]: one["value"][1] for one in found.value("macpool_gate_armed")}
        assert armed == {"one": "1", "two": "1"}
        identity = (
            "macpool_node_memory_ceiling_bytes - macpool_node_memory_margin_bytes - macpool_node_memory_current_bytes"
            " - macpool_node_memory_reserved_bytes - macpool_node_memory_headroom_bytes"
        )
        assert [one["value"][1] for one in found.value(identity)] == ["0", "0"]
        made.nodes["two"].kill()
        until(lambda: found.up() == {"macpool": "1", "one": "1", "two": "0"}, what="the dead node is down")
        assert made.coordinator is not None
        assert key not in found.log.read_text()


@pytest.mark.nightly
def test_without_the_token_nothing_is_scraped(made: Pool, tmp_path: Path):
    """CI has these tests:

    - `tests/contract/test_scrape.py::test_a_scrape_needs_the_scrape_token`
    - `tests/e2e/test_prometheus.py::test_nodes_are_found_scraped_and_missed`
    """
    made.join("one")
    wrong = made.create_key("chats", "infer")
    text = render_configuration(made.base, str(token_file(tmp_path, wrong)), rules="none.yml", interval_seconds=1)
    with prometheus(tmp_path / "prometheus", text) as found:
        until(lambda: found.up() == {"macpool": "0"}, what="the coordinator refuses")
        assert found.value("macpool_build_info") == []
        assert [one["lastError"] for one in found.api("targets")["activeTargets"]] == [
            "server returned HTTP status 403 Forbidden"
        ]


@pytest.mark.nightly
def test_the_folder_of_metrics_config_works_over_https_where_it_is_mounted(tmp_path: Path):
    """CI has these tests:

    - `tests/e2e/commands/test_watching.py::test_what_prometheus_needs_is_written_for_its_owner_alone`
    - `tests/unit/coordinator/metrics/test_scrape_config.py`
    - `tests/e2e/test_prometheus.py::test_nodes_are_found_scraped_and_missed`
    """
    needs("prometheus")
    with pool(tmp_path) as made:
        made.up("http.tls=on")
        made.join("one")
        written = Path(made.cli("metrics-config", "--folder", str(tmp_path / "written"))["folder"])
        text = (written / "prometheus.yml").read_text()
        assert f"scheme: {made.base.partition(':')[0]}" in text
        others = [written / name for name in ("rules.yml", "macpool.token", "macpool-ca.pem")]
        with prometheus(tmp_path / "mounted", text.replace("interval: 15s", "interval: 1s"), *others) as found:
            until(lambda: found.up() == {"macpool": "1", "one": "1"}, what="every target is up")
            (group,) = found.api("rules")["groups"]
            (down,) = [rule for rule in group["rules"] if rule["name"] == "NodeDown"]
            assert down["annotations"]["runbook_url"] == f"{made.base}/#/runbook/NodeDown"
