"""Real processes and real sockets, shared by tests, the demo and the benchmarks. Nothing is mocked."""
