"""Simulated Mac: the scripted engine with the costs of a chip, and the parts of its node."""
