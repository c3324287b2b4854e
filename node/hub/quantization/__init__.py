"""Quantization of models on this node: plan, lease of memory, and the process that quantizes."""
