"""Test support for videos: a small package, workers, and peers that answer leases."""
