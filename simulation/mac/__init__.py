"""Simulated Mac: the scripted engine with the speeds of a chip, and the other parts of its node."""
