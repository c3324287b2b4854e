"""Scripted engine: real frames, admission and pace without a model."""
