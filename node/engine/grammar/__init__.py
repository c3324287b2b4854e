"""Constrained generation: grammars of formats and tool calls, and the masks that they put on logits."""
