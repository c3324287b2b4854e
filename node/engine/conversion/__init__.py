"""Conversion of models on the disk, in a process of its own."""
