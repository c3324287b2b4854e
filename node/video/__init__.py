"""Video generation on a node: packages, environment, leases of memory, Ray, and the worker with its watchdog."""
