"""Events, logs, load history and the rows that show nodes."""
