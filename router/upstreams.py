"""Upstreams of the settings: other servers with OpenAI's API, which an alias may have as its last candidate.

There are none by default: without a section `[router.upstreams.NAME]`, no request leaves the pool.
"""

import ipaddress
from collections.abc import Mapping
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from router.aliases import UPSTREAM_PREFIX

Seconds = Annotated[float, Meta(gt=0, le=86_400)]


class UpstreamSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Section `router.upstreams.NAME`: one server with OpenAI's API."""

    url: Annotated[str, Meta(min_length=1, max_length=500)]
    """Base URL that ends in `/v1`: HTTPS, or HTTP to a loopback address."""
    model: Annotated[str, Meta(min_length=1, max_length=200)]
    """Name of the model on the upstream."""
    key_file: str = ""
    """File with the API key, readable only by its owner; empty to send no key."""
    ca_file: str = ""
    """PEM file of the authority that signed the server's certificate; empty for the authorities of the system."""
    proxy: str = ""
    """URL of a proxy, HTTP or HTTPS; empty for none. Proxy variables of the environment are ignored."""
    connect_seconds: Seconds = 5.0
    """Maximum seconds to connect or to wait for a free connection. Then the request fails."""
    idle_seconds: Seconds = 60.0
    """Maximum seconds without a byte of a streamed answer. Then the request fails."""
    total_seconds: Seconds = 600.0
    """Maximum seconds for a request, not counting the time that its client takes to read. Then the request fails."""
    stream_usage: bool = True
    """Whether to request token counts in streams (`stream_options.include_usage`)."""


def get_upstream_label(name: str, settings: UpstreamSettings) -> str:
    """Return the name of an upstream's model in answers, usage and metrics: `upstream:NAME/MODEL`."""
    return f"{UPSTREAM_PREFIX}{name}/{settings.model}"


def find_upstream_fault(upstreams: Mapping[str, UpstreamSettings]) -> str:
    """Return the first fault in the upstreams as one sentence, or an empty string if they are valid."""
    for name, upstream in upstreams.items():
        if not name.strip() or not name.isprintable() or not name.isascii() or "/" in name:
            return f"an upstream cannot have the name {name!r}"
        if not upstream.model.isprintable() or not upstream.model.isascii():
            return f"the model of the upstream {name} cannot have the name {upstream.model!r}"
        fault = _find_url_fault(upstream.url)
        if fault:
            return f"the url of the upstream {name} {fault}"
        fault = _find_proxy_fault(upstream.proxy)
        if fault:
            return f"the proxy of the upstream {name} {fault}"
    return ""


def _find_url_fault(url: str) -> str:
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        return f"is not valid: {error}"
    if parts.scheme not in ("http", "https") or not host or not url.isprintable() or " " in url:
        return "must be https://HOST/v1"
    if parts.username is not None or parts.query or parts.fragment:
        return "must have no user, password, query or fragment: write the key into key_file"
    if parts.scheme == "http" and not _is_loopback(host):
        return f"must be https, because its key and prompts could be read on the way to {host}"
    return ""


def _find_proxy_fault(url: str) -> str:
    """Return the fault in a proxy's URL, or an empty string if the URL is valid.

    The result never contains the URL, because a proxy's URL may contain a user and a password.
    """
    if not url:
        return ""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host, parts = None, urlsplit("")
    if parts.scheme not in ("http", "https") or not host or not url.isprintable() or " " in url:
        return "must be http://HOST:PORT or https://HOST:PORT"
    return ""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
