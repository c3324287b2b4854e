"""HTTP side of the router: routes, server-sent events and exchanges."""
