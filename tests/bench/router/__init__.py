"""Rows of the router and its HTTP side, with load clients and peers."""
