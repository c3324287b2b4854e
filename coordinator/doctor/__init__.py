"""`cluster doctor`: what can be wrong with a machine of the pool, how to see it, and what to do about it."""
