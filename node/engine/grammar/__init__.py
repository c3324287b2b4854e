"""Constrained generation: grammars of answer formats and tool calls, and the logits masks that follow from them."""
