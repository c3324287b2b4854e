"""`cluster doctor`: checks of a machine and its place in the pool, with the next step for each fault."""
