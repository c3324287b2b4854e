"""Events, logs, load history and rows of nodes."""
