"""Models in memory: loading, unloading, profiling and the search for the longest context."""
