"""The files of deploy/ for Prometheus and Grafana exist, listen on this machine alone, and hold no secret."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from coordinator.metrics.scrape_config import render_configuration
from dashboards.generate import BOARDS
from tests.support.prometheus import needs

DEPLOY = Path(__file__).parents[3] / "deploy"
COMPOSE = (DEPLOY / "docker-compose.yml").read_text()


def test_everything_that_is_mounted_exists():
    mounted = re.findall(r"- (\.{1,2}/\S+?):/", COMPOSE)
    assert len(mounted) == 6
    made = {"./secrets/prometheus"}
    assert {path for path in mounted if not (DEPLOY / path).exists()} == made, "only what metrics-config writes is new"
    assert {f"../dashboards/{name}" for name in BOARDS} <= set(mounted)


def test_ports_are_bound_to_this_machine():
    ports = re.findall(r"ports: \[(.+)\]", COMPOSE)
    assert len(ports) == 2
    assert all(port.startswith('"127.0.0.1:') for port in ports)


def test_images_are_pinned_and_secrets_are_files():
    images = re.findall(r"image: (\S+)", COMPOSE)
    assert all(re.search(r":v?\d+\.\d+\.\d+$", image) for image in images)
    assert 'GF_AUTH_ANONYMOUS_ENABLED: "false"' in COMPOSE
    assert "GF_SECURITY_ADMIN_PASSWORD__FILE" in COMPOSE
    secrets = re.findall(r"file: (\S+)", COMPOSE.partition("\nsecrets:")[2])
    assert len(secrets) == 1
    assert not any((DEPLOY / secret).exists() for secret in secrets), "secrets are not part of the repository"


def test_the_data_source_is_the_one_of_the_compose_file():
    source = (DEPLOY / "grafana" / "provisioning" / "datasources" / "prometheus.yaml").read_text()
    assert "url: http://prometheus:9090" in source
    provider = (DEPLOY / "grafana" / "provisioning" / "dashboards" / "macpool.yaml").read_text()
    assert "allowUiUpdates: false" in provider
    assert "path: /var/lib/grafana/dashboards" in provider


def test_prometheus_takes_the_committed_files(tmp_path: Path):
    needs("promtool")
    for name in ("prometheus.yml", "rules.yml"):
        shutil.copy(DEPLOY / "prometheus" / name, tmp_path)
    done = subprocess.run(
        ["promtool", "check", "config", "--syntax-only", "prometheus.yml"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    done = subprocess.run(["promtool", "check", "rules", "rules.yml"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["prometheus.yml", "rules.yml"])
def test_no_file_holds_a_token(name: str):
    assert not re.search(r"\bmp_[a-z2-7]{8}_", (DEPLOY / "prometheus" / name).read_text())


def test_the_folder_that_is_mounted_is_the_one_that_the_readme_has_written():
    (name,) = re.findall(r"--config.file=/etc/macpool/(\S+)", COMPOSE)
    assert name == "prometheus.yml"
    readme = (DEPLOY / "README.md").read_text()
    assert "cluster metrics-config --folder secrets/prometheus" in readme
    text = render_configuration("https://192.168.1.5:8080", "macpool.token", "macpool-ca.pem")
    assert "/" not in "".join(re.findall(r"(?:credentials_file|ca_file): '([^']*)'", text)), "found beside the file"
