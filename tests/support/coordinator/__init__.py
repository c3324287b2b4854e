"""Test support for the coordinator: a started one, and servers in its place."""
