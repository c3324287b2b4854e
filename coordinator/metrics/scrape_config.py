"""Configuration file with which Prometheus scrapes a pool.

`type: Bearer` is explicit, because inside `http_sd_configs` Prometheus 2.42 sends no type by default, and the
coordinator refuses a request without a type.
"""

from urllib.parse import urlsplit

SCRAPE_SECONDS = 5
"""Default interval of scrapes, in seconds.

With it, an alert about forward passes without a check by the gate fires within half a minute. This is the time of two
scrapes, two evaluations, and the delay of the alert.
"""


def render_configuration(
    base: str, token_file: str, ca_file: str = "", rules: str = "rules.yml", interval_seconds: int = 0
) -> str:
    """Return `prometheus.yml` for a coordinator at `base` (URL without a path).

    `token_file` has an API key with the scope `metrics`. `ca_file` is the trusted CA; if it is empty, the system's CAs
    are trusted. `rules` is the file of alert rules. `interval_seconds` is the interval of scrapes and of the evaluation
    of rules; 0 means `SCRAPE_SECONDS`.
    """
    where, seconds = urlsplit(base), interval_seconds or SCRAPE_SECONDS
    trust = f"\n    tls_config: {{ca_file: {_quote(ca_file)}}}" if ca_file else ""
    bearer = f"authorization: {{type: Bearer, credentials_file: {_quote(token_file)}}}"
    return f"""global:
  scrape_interval: {seconds}s
  scrape_timeout: {min(seconds, 4)}s
  evaluation_interval: {seconds}s

rule_files: [{_quote(rules)}]

scrape_configs:
  - job_name: macpool
    scheme: {where.scheme}
    {bearer}{trust}
    static_configs:
      - targets: [{_quote(where.netloc)}]

  - job_name: macpool-nodes
    {bearer}{trust}
    http_sd_configs:
      - url: {_quote(base + "/prometheus/sd")}
        refresh_interval: 15s
        {bearer}{trust.replace("    ", "        ")}
"""


def _quote(value: str) -> str:
    """Quote a text for YAML."""
    return "'" + value.replace("'", "''") + "'"
