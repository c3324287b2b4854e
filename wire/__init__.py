"""Protocol between coordinator and nodes, and the memory arithmetic that both use."""
