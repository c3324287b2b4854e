"""Aliases in the dispatcher: the candidates of a request, and their placement in order."""
