"""Quantize models on this node: plan, lease of memory, and supervision of the process that quantizes."""
