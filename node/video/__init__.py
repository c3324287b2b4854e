"""Video on a node: its packages, its environment, the worker that makes it, and what watches over that."""
