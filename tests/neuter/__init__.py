"""Proof that the tests of safety properties can fail."""
