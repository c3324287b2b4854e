"""Aliases in the dispatcher: the models and the upstream behind a name, and the order in which a request tries them."""
