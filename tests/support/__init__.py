"""What tests, the demo and the bench share: real processes, real sockets, no mocks."""
