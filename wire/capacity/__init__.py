"""Memory arithmetic and fair shares. Pure."""
