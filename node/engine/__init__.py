"""Engine process of a node: the only process that runs language models."""

from node.engine.transformers_import import install

install()
