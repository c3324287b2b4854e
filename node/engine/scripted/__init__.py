"""Scripted engine: real frames, admission and scheduling with a simulated model."""
