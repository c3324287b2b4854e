"""What Prometheus is told of the pool and of every node, and how it is asked."""
