"""Video jobs: each runs on one node, in memory that the node leases to the job."""
