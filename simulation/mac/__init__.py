"""Simulated Mac: the scripted engine with the costs of a chip, and what belongs to the node."""
