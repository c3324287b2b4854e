"""Commands of machines that use the pool: login, and trust in the endpoint."""
