"""Requests of real clients to the endpoint: driven (`drive`), recorded (`recorded/`) and replayed (`test_recorded`)."""
