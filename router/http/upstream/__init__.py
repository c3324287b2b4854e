"""Upstreams: the HTTP client of other servers with OpenAI's API, and the passing on of requests to them."""
