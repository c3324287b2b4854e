"""Settings of upstreams: URLs over which no key and no prompt can be read."""

import pytest

from router.upstreams import UpstreamSettings, find_upstream_fault, get_upstream_label


def fault(url: str, name: str = "home") -> str:
    return find_upstream_fault({name: UpstreamSettings(url=url, model="m")})


@pytest.mark.parametrize("url", ["https://example.com/v1", "http://127.0.0.1:8080/v1", "http://[::1]/v1"])
def test_https_and_loopback_are_allowed(url: str):
    assert fault(url) == ""


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("http://example.com/v1", "must be https, because its key and prompts could be read on the way to example.com"),
        ("http://localhost/v1", "must be https, because its key and prompts could be read on the way to localhost"),
        ("ftp://example.com", "must be https://HOST/v1"),
        ("example.com/v1", "must be https://HOST/v1"),
        ("https://", "must be https://HOST/v1"),
        ("https://a b/v1", "must be https://HOST/v1"),
        ("https://me:pw@example.com/v1", "must have no user, password, query or fragment: write the key into key_file"),
        ("https://example.com/v1?key=1", "must have no user, password, query or fragment: write the key into key_file"),
        ("https://example.com/v1#key", "must have no user, password, query or fragment: write the key into key_file"),
        ("https://example.com:99999/v1", "is not valid: Port out of range 0-65535"),
    ],
)
def test_a_wrong_url_is_one_sentence(url: str, text: str):
    assert fault(url) == f"the url of the upstream home {text}"


@pytest.mark.parametrize("name", ["", " ", "a/b", "a\nb", "ü"])
def test_a_name_fits_into_a_header(name: str):
    assert fault("https://example.com/v1", name) == f"an upstream cannot have the name {name!r}"


@pytest.mark.parametrize("model", ["a\r\nx: y", "ü"])
def test_a_model_fits_into_a_header(model: str):
    settings = UpstreamSettings(url="https://example.com/v1", model=model)
    fault = find_upstream_fault({"home": settings})
    assert fault == f"the model of the upstream home cannot have the name {model!r}"


def test_the_label_names_upstream_and_model():
    assert get_upstream_label("home", UpstreamSettings(url="https://h/v1", model="gpt")) == "upstream:home/gpt"


@pytest.mark.parametrize(
    "url", ["https://example.com/v1\x7f", "https://example.com/\u202ev1", "https://example.com/v 1"]
)
def test_a_url_has_only_characters_that_can_be_read(url: str):
    assert fault(url) == "the url of the upstream home must be https://HOST/v1"


@pytest.mark.parametrize("proxy", ["", "http://proxy.lan:3128", "https://me:pw@[::1]:3128"])
def test_a_proxy_of_http_is_allowed(proxy: str):
    assert find_upstream_fault({"home": UpstreamSettings(url="https://h/v1", model="m", proxy=proxy)}) == ""


@pytest.mark.parametrize(
    "proxy", ["proxy.lan:3128", "proxy.lan", "socks5://h:1", "http://", "http://h:99999", "http://[", "http://a b"]
)
def test_a_proxy_that_the_client_cannot_use_is_a_fault_of_the_settings(proxy: str):
    fault = find_upstream_fault({"home": UpstreamSettings(url="https://h/v1", model="m", proxy=proxy)})
    assert fault == "the proxy of the upstream home must be http://HOST:PORT or https://HOST:PORT"
