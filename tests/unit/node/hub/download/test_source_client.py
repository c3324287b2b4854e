"""Redirects that a client of model files follows."""

import httpx2
import pytest

from node.hub.download.source_client import is_allowed_redirect


@pytest.mark.parametrize(
    ("source", "target", "allowed"),
    [
        ("https", "https", True),
        ("http", "https", True),
        ("http", "http", True),
        ("https", "http", False),
        ("http", "file", False),
        ("https", "ftp", False),
    ],
)
def test_is_allowed_redirect_never_leaves_https(source: str, target: str, allowed: bool):
    urls = (httpx2.URL(f"{scheme}://hub.example/x") for scheme in (source, target))
    assert is_allowed_redirect(*urls) == allowed
