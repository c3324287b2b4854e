"""Kinds of engine with the names of their modules, which are not imported: the agent needs no model library."""

from typing import Final

KINDS: Final = {"mlx": "node.engine.build", "scripted": "node.engine.scripted.engine"}
"""Name of the module that provides `build`, by engine kind."""
