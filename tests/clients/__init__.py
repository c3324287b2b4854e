"""What real clients say to the endpoint: driven (`drive`), recorded (`recorded/`) and replayed (`test_recorded`)."""
