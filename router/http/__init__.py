"""HTTP side of the router: the ASGI app with its routes, exchanges, server-sent events, and upstreams."""
