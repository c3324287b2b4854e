"""The log of the protective settings: values in force, and no secrets."""

import time
from pathlib import Path

import msgspec
from structlog.testing import capture_logs

from coordinator.startup.options import RunOptions, log_guards
from coordinator.state.settings import CoordinatorSettings
from coordinator.tls.certificate_files import CertificateFiles
from coordinator.tls.https_ca import HttpsCa
from coordinator.tls.https_config import EndpointTls


def log(settings: CoordinatorSettings, tls: EndpointTls) -> dict[str, object]:
    """Return the fields of the event."""
    options = RunOptions(
        Path("state"), ("0.0.0.0", 8080), ("::", 8081), local_node=True, node_arguments=(), settings=settings
    )
    with capture_logs() as logs:
        log_guards(options, tls)
    (event,) = logs
    assert (event["event"], event["log_level"]) == ("guards resolved", "info")
    return {name: value for name, value in event.items() if name not in ("event", "log_level")}


def test_the_default_guards_are_logged(tmp_path: Path) -> None:
    guards = log(CoordinatorSettings(), HttpsCa(tmp_path, (), time.time))
    assert guards.pop("conditions")
    assert guards == {
        "listen": "0.0.0.0:8080",
        "cluster_listen": ":::8081",
        "tls": "own authority",
        "anonymous": False,
        "hosts": "addresses, localhost and .local names",
        "origins": "none",
        "policy": "balanced",
        "queue_limit": "max(64, 4 x nodes)",
        "body_bytes": CoordinatorSettings().router.max_body_bytes,
        "upstreams": "none",
        "webhook": "none",
    }


def test_of_the_url_of_a_webhook_only_the_host_is_logged(tmp_path: Path) -> None:
    tree = {
        "http": {"anonymous": True, "allowed_hosts": "pool.example", "allowed_origins": "app://obsidian.md"},
        "router": {"queue_limit": 7, "upstreams": {"home": {"url": "https://h.example/v1", "model": "far"}}},
        "alerts": {"webhook_url": "https://hooks.example/T0/secret"},
    }
    HttpsCa(tmp_path, (), time.time)
    files = CertificateFiles(tmp_path / "endpoint.pem", tmp_path / "endpoint.pem")
    guards = log(msgspec.convert(tree, CoordinatorSettings), files)
    shown = ("tls", "anonymous", "hosts", "origins", "queue_limit", "upstreams", "webhook")
    assert [guards[name] for name in shown] == [
        "given files",
        True,
        "pool.example",
        "app://obsidian.md",
        7,
        "home",
        "hooks.example",
    ]
    assert log(CoordinatorSettings(), None)["tls"] == "off"
