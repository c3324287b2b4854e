"""Tools of a model's owner: quantization on a node, and measured speeds."""
