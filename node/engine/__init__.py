"""Engine of a node: all modules that import MLX. The engine process runs models, a child process quantizes them."""

from node.engine.transformers_import import install

install()
