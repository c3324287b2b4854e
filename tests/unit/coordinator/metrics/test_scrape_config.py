"""The complete Prometheus configuration as written."""

from coordinator.metrics.scrape_config import render_configuration

PLAIN = """global:
  scrape_interval: 5s
  scrape_timeout: 4s
  evaluation_interval: 5s

rule_files: ['rules.yml']

scrape_configs:
  - job_name: macpool
    scheme: http
    authorization: {type: Bearer, credentials_file: 'token'}
    static_configs:
      - targets: ['10.0.0.1:8080']

  - job_name: macpool-nodes
    authorization: {type: Bearer, credentials_file: 'token'}
    http_sd_configs:
      - url: 'http://10.0.0.1:8080/prometheus/sd'
        refresh_interval: 15s
        authorization: {type: Bearer, credentials_file: 'token'}
"""
TRUSTING = """global:
  scrape_interval: 3s
  scrape_timeout: 3s
  evaluation_interval: 3s

rule_files: ['it''s.yml']

scrape_configs:
  - job_name: macpool
    scheme: https
    authorization: {type: Bearer, credentials_file: 'token'}
    tls_config: {ca_file: 'ca.pem'}
    static_configs:
      - targets: ['studio.local:8080']

  - job_name: macpool-nodes
    authorization: {type: Bearer, credentials_file: 'token'}
    tls_config: {ca_file: 'ca.pem'}
    http_sd_configs:
      - url: 'https://studio.local:8080/prometheus/sd'
        refresh_interval: 15s
        authorization: {type: Bearer, credentials_file: 'token'}
        tls_config: {ca_file: 'ca.pem'}
"""


def test_the_configuration_scrapes_the_coordinator_and_the_nodes_behind_it():
    assert render_configuration("http://10.0.0.1:8080", "token") == PLAIN
    assert render_configuration("https://studio.local:8080", "token", "ca.pem", "it's.yml", 3) == TRUSTING
