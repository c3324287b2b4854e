"""Upstreams: an HTTP client for other servers with OpenAI's API, which passes requests on to them."""
